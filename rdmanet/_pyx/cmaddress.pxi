# What the connection manager is told, in C: socket addresses, to and from (ip, port) or (ip, port, flowinfo, scope_id),
# and the parameters of a connection.

cdef extern from "<arpa/inet.h>" nogil:
    struct in_addr:
        pass
    struct in6_addr:
        pass
    struct sockaddr_in:
        uint16_t sin_family
        uint16_t sin_port
        in_addr sin_addr
    struct sockaddr_in6:
        uint16_t sin6_family
        uint16_t sin6_port
        uint32_t sin6_flowinfo
        in6_addr sin6_addr
        uint32_t sin6_scope_id
    enum: AF_INET, AF_INET6
    uint16_t htons(uint16_t value)
    uint16_t ntohs(uint16_t value)
    int inet_pton(int family, const char *text, void *address)
    const char *inet_ntop(int family, const void *address, char *text, unsigned int size)


cdef int fill_sockaddr(verbs.sockaddr_storage *c, address) except -1:
    """Convert (ip, port) or (ip, port, flowinfo, scope_id). Host names have to be resolved before."""
    cdef sockaddr_in *v4 = <sockaddr_in *>c
    cdef sockaddr_in6 *v6 = <sockaddr_in6 *>c
    cdef bytes host
    cdef int port
    memset(c, 0, sizeof(c[0]))
    if not isinstance(address, (tuple, list)) or not 2 <= len(address) <= 4 or not isinstance(address[0], str):
        raise TypeError(f"{shown(address)} is not (ip, port) or (ip, port, flowinfo, scope_id)")
    text, number = address[0], PyNumber_Index(address[1])
    if not 0 <= number <= 65535:
        raise OverflowError(f"port {number} is not in 0..65535")
    port = number
    if "\0" in text:
        raise ValueError(f"{shown(text)} is not an IP address")
    text, _, zone = text.partition("%")
    host = text.encode()
    if inet_pton(AF_INET, host, &v4.sin_addr) == 1:
        v4.sin_family = AF_INET
        v4.sin_port = htons(port)
    elif inet_pton(AF_INET6, host, &v6.sin6_addr) == 1:
        v6.sin6_family = AF_INET6
        v6.sin6_port = htons(port)
        if len(address) > 2:
            v6.sin6_flowinfo = htonl(address[2])
        if len(address) > 3:
            v6.sin6_scope_id = address[3]
        elif zone:
            v6.sin6_scope_id = int(zone) if zone.isdecimal() else socket.if_nametoindex(zone)
    else:
        raise ValueError(f"{shown(address[0])} is not an IP address")
    return 0


cdef uint32_t _last_v4 = 0
cdef str _last_v4_text = "0.0.0.0"      # both ends of a connection within a host have mostly the same address


cdef str text_of_v4(const in_addr *address):
    global _last_v4, _last_v4_text
    cdef uint32_t number
    cdef char text[64]
    memcpy(&number, address, sizeof(number))
    if number != _last_v4 and inet_ntop(AF_INET, address, text, sizeof(text)) is not NULL:
        _last_v4_text, _last_v4 = text.decode(), number
    return _last_v4_text


cdef object read_sockaddr(verbs.sockaddr *c):
    cdef sockaddr_in *v4 = <sockaddr_in *>c
    cdef sockaddr_in6 *v6 = <sockaddr_in6 *>c
    cdef char text[64]
    if v4.sin_family == AF_INET:
        return text_of_v4(&v4.sin_addr), ntohs(v4.sin_port)
    if v4.sin_family == AF_INET6 and inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text)) is not NULL:
        return text.decode(), ntohs(v6.sin6_port), ntohl(v6.sin6_flowinfo), v6.sin6_scope_id
    return None


cdef str resolving(dst_addr, src_addr):
    """For an error of rdma_resolve_addr(): the addresses. With a source, that may be what is wrong."""
    origin = "" if src_addr is None else f" from {src_addr[0]}, {src_addr[1]}"
    return f"rdma_resolve_addr({dst_addr[0]}, {dst_addr[1]}{origin})"


cdef uint8_t data_length(bytes data) except? 255:
    if len(data) > 255:
        raise ValueError(f"private data of {len(data)} bytes is too long: a message carries at most 255")
    return len(data)


cdef inline int in_range(str name, int value, int most) except -1:
    if not 0 <= value <= most:
        raise ValueError(f"{name} {value} is not in 0..{most}")
    return 0


cdef int fill_param(verbs.rdma_conn_param *c, bytes data, int responder_resources, int initiator_depth,
                    int retry_count, int rnr_retry_count) except -1:
    in_range("responder_resources", responder_resources, 255)
    in_range("initiator_depth", initiator_depth, 255)
    in_range("retry_count", retry_count, 7)
    in_range("rnr_retry_count", rnr_retry_count, 7)
    memset(c, 0, sizeof(c[0]))
    c.private_data = <const char *>data if data else NULL
    c.private_data_len = data_length(data)
    c.responder_resources = responder_resources
    c.initiator_depth = initiator_depth
    c.retry_count = retry_count
    c.rnr_retry_count = rnr_retry_count
    return 0
