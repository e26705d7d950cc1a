/* SPDX-License-Identifier: Apache-2.0 */
/* Identifiers without a channel: calls that wait, endpoints, and what a program finds in id->event. */
#include "cm_harness.h"

#include <pthread.h>
#include <sys/wait.h>

static struct rdma_addrinfo *find(const char *node, const char *service, int flags)
{
	struct rdma_addrinfo hints = {.ai_flags = flags, .ai_port_space = RDMA_PS_TCP, .ai_family = AF_INET}, *info;

	CHECK(!rdma_getaddrinfo(node, service, &hints, &info));
	return info;
}

static struct ibv_qp_init_attr attributes(void)
{
	return (struct ibv_qp_init_attr){
		.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}, .sq_sig_all = 1};
}

static const char *service(struct rdma_cm_id *listener)
{
	static char text[8];

	snprintf(text, sizeof text, "%u", (unsigned)ntohs(rdma_get_src_port(listener)));
	return text;
}

static struct rdma_cm_id *listening_endpoint(void)
{
	struct rdma_addrinfo *info = find("127.0.0.1", "0", RAI_PASSIVE);
	struct ibv_qp_init_attr attr = attributes();
	struct rdma_cm_id *listener;

	CHECK(!rdma_create_ep(&listener, info, NULL, &attr));
	rdma_freeaddrinfo(info);
	CHECK(!listener->qp && listener->channel);
	CHECK(!rdma_listen(listener, 4));
	return listener;
}

static struct rdma_cm_id *active_endpoint(const char *port)
{
	struct rdma_addrinfo *info = find("127.0.0.1", port, 0);
	struct ibv_qp_init_attr attr = attributes();
	struct rdma_cm_id *id;

	CHECK(!rdma_create_ep(&id, info, NULL, &attr));
	rdma_freeaddrinfo(info);
	CHECK(id->qp && id->pd && id->send_cq && id->recv_cq && id->route.num_paths == 1);
	CHECK(id->event && id->event->event == RDMA_CM_EVENT_ROUTE_RESOLVED);
	return id;
}

/* One message, waited for as rdma_verbs.h does. */
static struct ibv_wc wait_for(struct ibv_cq *cq, struct ibv_comp_channel *channel)
{
	struct ibv_wc wc;
	struct ibv_cq *told;
	void *context;

	while (!ibv_poll_cq(cq, 1, &wc)) {
		CHECK(!ibv_req_notify_cq(cq, 0));
		if (ibv_poll_cq(cq, 1, &wc))
			break;
		CHECK(!ibv_get_cq_event(channel, &told, &context) && told == cq);
		ibv_ack_cq_events(cq, 1);
	}
	return wc;
}

/* --- a server in a thread, a client here -------------------------------------------------------------- */

static char inbox[64];

static void *serve(void *argument)
{
	struct rdma_cm_id *listener = argument, *id;
	struct rdma_conn_param answer = with_data("welcome");
	struct ibv_mr *mr;
	struct ibv_sge sge;
	struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;

	CHECK(!rdma_get_request(listener, &id));
	CHECK(id->qp && id->channel != listener->channel && id->event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(id->event->listen_id == listener && !strcmp(id->event->param.conn.private_data, "hello"));
	CHECK((mr = ibv_reg_mr(id->pd, inbox, sizeof inbox, IBV_ACCESS_LOCAL_WRITE)));
	sge = (struct ibv_sge){.addr = (uintptr_t)inbox, .length = sizeof inbox, .lkey = mr->lkey};
	CHECK(!ibv_post_recv(id->qp, &wr, &bad));
	CHECK(!rdma_accept(id, &answer));
	CHECK(id->event->event == RDMA_CM_EVENT_ESTABLISHED && id->qp->state == IBV_QPS_RTS);
	CHECK(wait_for(id->recv_cq, id->recv_cq_channel).status == IBV_WC_SUCCESS);
	CHECK(!strcmp(inbox, "a message"));
	CHECK(!rdma_disconnect(id));
	CHECK(id->event->event == RDMA_CM_EVENT_DISCONNECTED);
	CHECK(!rdma_disconnect(id)); /* and does not wait for what has been */
	CHECK(!ibv_dereg_mr(mr));
	rdma_destroy_ep(id);
	return NULL;
}

static void endpoints_talk(void)
{
	struct rdma_cm_id *listener = listening_endpoint(), *id = active_endpoint(service(listener));
	struct rdma_conn_param param = with_data("hello");
	char text[] = "a message";
	struct ibv_sge sge = {.addr = (uintptr_t)text, .length = sizeof text};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE}, *bad;
	pthread_t server;

	CHECK(!pthread_create(&server, NULL, serve, listener));
	CHECK(!rdma_connect(id, &param));
	CHECK(id->event->event == RDMA_CM_EVENT_ESTABLISHED);
	CHECK(!strcmp(id->event->param.conn.private_data, "welcome"));
	CHECK(!ibv_post_send(id->qp, &wr, &bad)); /* inline data fit though none were asked for */
	CHECK(wait_for(id->send_cq, id->send_cq_channel).status == IBV_WC_SUCCESS);
	CHECK(!rdma_disconnect(id));
	CHECK(!pthread_join(server, NULL));
	rdma_destroy_ep(id);
	rdma_destroy_ep(listener);
	CHECK(rn_fd_count() == 0);
}

/* --- bad ends -------------------------------------------------------------------------------------------- */

static void *refuse(void *argument)
{
	struct rdma_cm_id *listener = argument, *id;

	CHECK(!rdma_get_request(listener, &id));
	CHECK(!rdma_reject(id, "go away", 8));
	rdma_destroy_ep(id);
	return NULL;
}

static void refusals_are_errors(void)
{
	struct rdma_cm_id *listener = listening_endpoint(), *id = active_endpoint(service(listener)), *nobody;
	struct rdma_conn_param param = plain;
	pthread_t server;

	CHECK(!pthread_create(&server, NULL, refuse, listener));
	CHECK(rdma_connect(id, &param) == -1 && errno == ECONNREFUSED);
	CHECK(id->event->event == RDMA_CM_EVENT_REJECTED && id->event->status == RN_REJ_CONSUMER_DEFINED);
	CHECK(!strcmp(id->event->param.conn.private_data, "go away"));
	CHECK(!pthread_join(server, NULL));
	rdma_destroy_ep(id);

	nobody = active_endpoint("1");
	CHECK(rdma_connect(nobody, &param) == -1 && errno == ECONNREFUSED);
	CHECK(nobody->event->status == RN_REJ_INVALID_SERVICE_ID);
	CHECK(nobody->qp->state == IBV_QPS_ERR);
	rdma_destroy_ep(nobody);
	rdma_destroy_ep(listener);
	CHECK(rn_fd_count() == 0);
}

static void wrong_uses_are_refused(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *id = new_id(channel), *request, *sync;
	struct sockaddr_in nowhere = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_BROADCAST)};
	struct rdma_addrinfo *info = find("127.0.0.1", "0", 0);
	struct ibv_qp_init_attr attr = attributes();
	struct ibv_pd *strange;
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(devices[0]);

	CHECK(rdma_get_request(id, &request) == -1 && errno == EINVAL);
	CHECK(!rdma_create_id(NULL, &sync, NULL, RDMA_PS_TCP));
	CHECK(rdma_resolve_addr(sync, NULL, (struct sockaddr *)&nowhere, 0) == -1);
	CHECK(errno == EHOSTUNREACH || errno == ENETUNREACH); /* the latter where no way leads out */
	CHECK(sync->event->event == RDMA_CM_EVENT_ADDR_ERROR);
	CHECK(!rdma_migrate_id(sync, NULL)); /* it is, already */
	CHECK(!rdma_migrate_id(sync, channel));
	CHECK(sync->channel == channel && !sync->event);
	CHECK(!rdma_destroy_id(sync));

	/* A PD of another context makes no queue pair; nothing is left of the endpoint. */
	CHECK(context && (strange = ibv_alloc_pd(context)));
	CHECK(rdma_create_ep(&sync, info, strange, &attr) == -1 && errno == EINVAL);
	CHECK(!ibv_dealloc_pd(strange));
	CHECK(!ibv_close_device(context));
	ibv_free_device_list(devices);
	rdma_freeaddrinfo(info);
	CHECK(!rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

/* What was begun with a channel goes on without, and the other way round. */
static void becomes_synchronous(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *id = new_id(channel);
	struct sockaddr_in to = address(9);

	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 0));
	CHECK(!rdma_migrate_id(id, NULL));
	want_none(channel, 0);
	CHECK(rdma_get_cm_event(id->channel, &id->event) == 0); /* it came along */
	CHECK(id->event->event == RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(!rdma_resolve_route(id, 0));
	CHECK(id->event->event == RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(!rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

static _Atomic bool told;

static void *read_for_ever(void *argument)
{
	struct rdma_event_channel *channel = argument;
	struct rdma_cm_event *event;

	CHECK(!rdma_get_cm_event(channel, &event));
	rdma_ack_cm_event(event);
	told = true;
	rdma_get_cm_event(channel, &event);
	CHECK(!"it comes back from a channel that is gone");
	return NULL;
}

/* rping of rdma-core 44 does it. */
static void destroyed_under_its_reader(void)
{
	struct sockaddr_in to = address(9);
	pthread_t reader;
	int status;
	pid_t pid;

	fflush(NULL);
	pid = fork();
	if (!pid) {
		struct rdma_event_channel *channel = rdma_create_event_channel();
		struct rdma_cm_id *id = new_id(channel);

		CHECK(!pthread_create(&reader, NULL, read_for_ever, channel));
		CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 0));
		EVENTUALLY(told);
		CHECK(!rdma_destroy_id(id));
		rdma_destroy_event_channel(channel);
		usleep(20000);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

/* --- small things ------------------------------------------------------------------------------------------ */

static void shared_receive_queues(void)
{
	struct rdma_event_channel *channel = new_channel();
	struct rdma_cm_id *id = new_id(channel);
	struct ibv_srq_init_attr srq = {.attr = {.max_wr = 5, .max_sge = 1}};
	struct ibv_qp_init_attr attr = attributes();

	CHECK(rdma_create_srq(id, NULL, &srq) == -1 && errno == EINVAL); /* on no device yet */
	resolve(id, 9);
	CHECK(!rdma_create_srq(id, NULL, &srq));
	CHECK(id->srq && id->pd && srq.attr.max_wr >= 5);
	CHECK(rdma_create_srq(id, NULL, &srq) == -1 && errno == EINVAL);
	attr.qp_type = IBV_QPT_RC;
	CHECK(!rdma_create_qp(id, NULL, &attr));
	CHECK(id->qp->srq == id->srq);
	rdma_destroy_qp(id);
	rdma_destroy_srq(id);
	CHECK(!id->srq);
	rdma_destroy_srq(id);
	CHECK(!rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

/* --- XRC: a target and an SRQ there, whose number travels as private data ------------------------------------ */

static struct rdma_cm_id *xrc_endpoint(const char *port, int flags, enum ibv_qp_type type)
{
	struct rdma_addrinfo hints = {
		.ai_flags = flags, .ai_port_space = RDMA_PS_IB, .ai_qp_type = type, .ai_family = AF_INET}, *info;
	struct ibv_qp_init_attr attr = attributes();
	struct rdma_cm_id *id;

	CHECK(!rdma_getaddrinfo("127.0.0.1", port, &hints, &info));
	CHECK(info->ai_qp_type == (int)type && info->ai_port_space == RDMA_PS_IB);
	CHECK(!rdma_create_ep(&id, info, NULL, &attr));
	rdma_freeaddrinfo(info);
	CHECK(id->qp_type == type);
	return id;
}

static void *serve_xrc(void *argument)
{
	struct rdma_cm_id *listener = argument, *id;
	struct ibv_srq_init_attr attr = {.attr = {.max_wr = 4, .max_sge = 1}};
	struct rdma_conn_param answer = plain;
	struct ibv_recv_wr *bad;
	struct ibv_mr *mr;
	struct ibv_wc wc;
	uint32_t number;

	CHECK(!rdma_get_request(listener, &id));
	CHECK(id->qp_type == IBV_QPT_XRC_RECV && id->qp->qp_type == IBV_QPT_XRC_RECV);
	CHECK(!rdma_create_srq(id, NULL, &attr));
	CHECK(id->srq && id->recv_cq && id->recv_cq_channel && !ibv_get_srq_num(id->srq, &number));
	CHECK((mr = ibv_reg_mr(id->pd, inbox, sizeof inbox, IBV_ACCESS_LOCAL_WRITE)));
	{
		struct ibv_sge sge = {.addr = (uintptr_t)inbox, .length = sizeof inbox, .lkey = mr->lkey};
		struct ibv_recv_wr wr = {.wr_id = 7, .sg_list = &sge, .num_sge = 1};

		CHECK(!ibv_post_srq_recv(id->srq, &wr, &bad));
	}
	answer.private_data = &number;
	answer.private_data_len = sizeof number;
	CHECK(!rdma_accept(id, &answer));
	wc = wait_for(id->recv_cq, id->recv_cq_channel);
	CHECK(!wc.status && wc.wr_id == 7 && wc.byte_len == 6 && !strcmp(inbox, "hello"));
	rdma_disconnect(id);
	CHECK(!ibv_dereg_mr(mr));
	rdma_destroy_ep(id); /* the queue pair goes first, and leaves the SRQ its completion queue */
	return NULL;
}

static void extended_reliable_connections(void)
{
	struct rdma_cm_id *listener = xrc_endpoint("0", RAI_PASSIVE, IBV_QPT_XRC_RECV), *id, *other;
	struct rdma_conn_param param = plain;
	struct ibv_send_wr *bad;
	pthread_t server;
	struct ibv_wc wc;

	CHECK(!rdma_listen(listener, 4));
	/* Who asks with a queue pair of another kind is turned away, and nobody is bothered. */
	other = active_endpoint(service(listener));
	CHECK(rdma_connect(other, &param) == -1 && errno == ECONNREFUSED);
	CHECK(other->event->event == RDMA_CM_EVENT_REJECTED && other->event->status == RN_REJ_CONSUMER_DEFINED);
	rdma_destroy_ep(other);

	CHECK(!pthread_create(&server, NULL, serve_xrc, listener));
	id = xrc_endpoint(service(listener), 0, IBV_QPT_XRC_SEND);
	CHECK(!rdma_connect(id, &param));
	CHECK(id->event->param.conn.private_data_len >= sizeof(uint32_t));
	{
		struct ibv_sge sge = {.addr = (uintptr_t)"hello", .length = 6};
		struct ibv_send_wr wr = {.wr_id = 3, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
					 .send_flags = IBV_SEND_INLINE};

		memcpy(&wr.qp_type.xrc.remote_srqn, id->event->param.conn.private_data, sizeof(uint32_t));
		CHECK(!ibv_post_send(id->qp, &wr, &bad));
	}
	wc = wait_for(id->send_cq, id->send_cq_channel);
	CHECK(!wc.status && wc.wr_id == 3);
	rdma_disconnect(id);
	CHECK(!pthread_join(server, NULL));
	rdma_destroy_ep(id);
	rdma_destroy_ep(listener);
	CHECK(rn_fd_count() == 0);
}

/* The options of vendors travel both ways, for those who make queue pairs themselves. */
static void ece_is_carried(void)
{
	struct rdma_event_channel *channel = new_channel();
	uint16_t port;
	struct rdma_cm_id *listener = new_listener(channel, 1, &port), *id = new_id(channel), *passive;
	struct ibv_ece ece = {0}, got;
	struct rdma_conn_param param = plain;
	struct rdma_cm_event *event;

	resolve(id, port);
	CHECK(rdma_set_local_ece(id, &ece) == -1 && errno == EINVAL); /* of no vendor */
	ece = (struct ibv_ece){.vendor_id = 0x15b3, .options = 7};
	CHECK(!rdma_set_local_ece(id, &ece));
	param.qp_num = 0x123456;
	CHECK(!rdma_connect(id, &param));
	event = want(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	rdma_ack_cm_event(event);
	CHECK(!rdma_get_remote_ece(passive, &got));
	CHECK(got.vendor_id == 0x15b3 && got.options == 7 && !got.comp_mask);
	ece.options = 5;
	CHECK(!rdma_set_local_ece(passive, &ece));
	param.qp_num = 0x123457;
	CHECK(!rdma_accept(passive, &param));
	want_status(channel, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
	CHECK(!rdma_get_remote_ece(id, &got));
	CHECK(got.vendor_id == 0x15b3 && got.options == 5);
	CHECK(!rdma_establish(id));
	want_status(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	make_qp(id);
	CHECK(rdma_get_remote_ece(id, &got) == -1 && errno == EINVAL);
	CHECK(rdma_set_local_ece(id, &ece) == -1 && errno == EINVAL);
	destroy(id);
	want_status(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	CHECK(!rdma_destroy_id(passive));
	CHECK(!rdma_destroy_id(listener));
	close_shared();
	rdma_destroy_event_channel(channel);
	CHECK(rn_fd_count() == 0);
}

int main(void)
{
	RUN(endpoints_talk);
	RUN(refusals_are_errors);
	RUN(wrong_uses_are_refused);
	RUN(becomes_synchronous);
	RUN(destroyed_under_its_reader);
	RUN(shared_receive_queues);
	RUN(extended_reliable_connections);
	RUN(ece_is_carried);
	return 0;
}
