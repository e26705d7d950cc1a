# cython: language_level=3, auto_pickle=False
"""What a message of msgpack is going to make, before anything of it is made: weigh().

One byte of msgpack may become an object of 72 bytes, or of many more, and a map whose keys collide takes time that
grows with the square of their number. So a limit of the bytes of a message limits neither memory nor time. This goes
once through the bytes, makes nothing, and takes a few nanoseconds for each value, a part of what decoding it takes.

    memory    What CPython's objects take on a 64-bit machine. For containers and texts the caller knows better: a
              class may make more of them than a list or a str. What is in texts and bytes does not count, as it is in
              the message as well; only what a text takes more, if its characters have two or four bytes.
    keys      Hashes of texts and bytes are randomized; those of numbers are known to everybody, and those of tuples
              of numbers. So the keys of a map that are numbers are put into tables of all sizes that its dictionary
              may have, as CPython does it. If that takes more than COLLISIONS steps a key, they collide. A map may
              have KEYS_MOST keys whose hashes are not computed here; the sum of their squares over all maps of a
              message is at most PAIRS_MOST. Times have hashes that are known, too, but hardly two of them the same.
    sets      Where the types have some, an array may become one. Its items are tried as keys are.
    tags      The decoder looks for the tag of a union in a map, and skips what is before it. In maps inside of each
              other, it skips the innermost bytes once for each. What it will skip is added up.

What is no msgpack, and what ends early, is left to the decoder.
"""

import os

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef extern from * nogil:
    """
    #include "weighing_keys.h"

    static bool rn_weigh_read(struct rn_scale *s, unsigned length, uint64_t *value)
    {
        *value = 0;
        if ((size_t)(s->end - s->at) < length)
            return false;
        while (length--)
            *value = *value << 8 | *s->at++;
        return true;
    }

    static enum rn_weighed rn_weigh_value(struct rn_scale *s, unsigned depth, struct rn_keys *keys);

    static enum rn_weighed rn_weigh_number(struct rn_scale *s, struct rn_keys *keys, uint64_t magnitude, bool negative)
    {
        s->bytes += s->number_bytes;
        if (magnitude > 256 || (negative && magnitude > 5))
            s->bytes += 32;
        if (s->has_float_keys && magnitude > 1ull << 53)
            rn_key_is_unknown(keys); /* its float may be that of others as well */
        rn_key_is(keys, rn_hash_signed(magnitude, negative), magnitude, negative);
        return RN_WEIGHED;
    }

    static enum rn_weighed rn_weigh_float(struct rn_scale *s, struct rn_keys *keys, double value, uint64_t bits)
    {
        s->bytes += 32; /* it has 24, for which 32 are allocated */
        if (s->text_keys > 1)
            rn_key_is_unknown(keys); /* a decimal has the digits of the shortest text, not all of the float's */
        else
            rn_key_is(keys, isfinite(value) ? rn_hash_double(value) : 0, bits, 2);
        return RN_WEIGHED;
    }

    static bool rn_is_tag(const struct rn_scale *s, const uint8_t *name, uint64_t length)
    {
        uint32_t tag_length;

        for (const uint8_t *tag = s->tags; tag < s->tags_end; tag += tag_length) {
            memcpy(&tag_length, tag, sizeof(tag_length));
            tag += sizeof(tag_length);
            if (tag_length == length && !memcmp(tag, name, length))
                return true;
        }
        return false;
    }

    static enum rn_weighed rn_weigh_bytes(struct rn_scale *s, struct rn_keys *keys, uint64_t length, bool is_text)
    {
        uint8_t largest = 0;

        if ((uint64_t)(s->end - s->at) < length)
            return RN_NO_MSGPACK;
        s->bytes += s->text_bytes;
        if (is_text) {
            for (uint64_t i = 0; i < length; i++)
                largest = s->at[i] > largest ? s->at[i] : largest;
            s->bytes += largest >= 0xf0 ? RN_WIDE_BYTES + 3 * length : largest >= 0x80 ? RN_WIDE_BYTES + length : 0;
        }
        if (keys)
            rn_key_is_text(s, keys, s->at, length, is_text);
        if (keys && keys->untagged && is_text && rn_is_tag(s, s->at, length)) {
            s->skipped += (uint64_t)(s->at - keys->untagged);
            keys->untagged = NULL;
        }
        s->at += length;
        return s->skipped > s->skipped_most ? RN_TAGS_LATE : RN_WEIGHED;
    }

    static enum rn_weighed rn_weigh_ext(struct rn_scale *s, struct rn_keys *keys, uint64_t length)
    {
        if ((uint64_t)(s->end - s->at) <= length)
            return RN_NO_MSGPACK;
        if (*s->at == RN_EXT_TIME)
            rn_key_is_random(keys, s->at, length + 1);
        else
            rn_key_is_unknown(keys);
        return rn_weigh_bytes(s, NULL, length + 1, false);
    }

    static enum rn_weighed rn_weigh_items(struct rn_scale *s, unsigned depth, uint64_t count, struct rn_keys *keys)
    {
        enum rn_weighed found = RN_WEIGHED;
        bool is_map = keys->are_of_map, has_keys = is_map || s->has_sets;

        if (depth >= RN_WEIGH_DEPTH)
            return RN_TOO_DEEP;
        if ((uint64_t)(s->end - s->at) < count * (is_map ? 2 : 1))
            return RN_NO_MSGPACK;
        if (is_map)
            s->bytes += (count ? RN_DICT_BYTES : 0) + count * RN_ENTRY_BYTES;
        else
            s->bytes += count * (s->has_sets ? RN_ENTRY_BYTES : RN_SLOT_BYTES);
        if (s->bytes > s->most)
            return RN_TOO_MUCH;
        if (has_keys && count >= RN_KEYS_FEW && !(keys->keys = malloc(count * sizeof(*keys->keys))))
            return RN_NO_MEMORY;
        for (uint64_t i = 0; i < count && found == RN_WEIGHED; i++) {
            found = rn_weigh_value(s, depth + 1, has_keys || keys->are_of_tuple ? keys : NULL);
            if (is_map && found == RN_WEIGHED)
                found = rn_weigh_value(s, depth + 1, NULL);
        }
        if (found == RN_WEIGHED && has_keys)
            found = rn_keys_try(s, keys, 0);
        if (found == RN_WEIGHED && has_keys && !is_map)
            found = rn_keys_try(s, keys, 9); /* a set tries its neighbours first */
        free(keys->keys);
        return found;
    }

    static enum rn_weighed rn_weigh_container(struct rn_scale *s, unsigned depth, struct rn_keys *keys,
                                              uint64_t count, bool is_map)
    {
        bool is_key = keys && (keys->are_of_map || keys->are_of_tuple || s->has_sets == 2);
        struct rn_keys items = {.are_of_map = is_map, .are_of_tuple = is_key && !is_map, .hash = RN_TUPLE_BEGINS};
        enum rn_weighed found;

        s->bytes += s->container_bytes;
        items.untagged = is_map ? s->at : NULL;
        found = rn_weigh_items(s, depth, count, &items);
        if (is_key && (is_map || items.unknown || s->has_set_keys))
            rn_key_is_unknown(keys);
        else if (is_key)
            rn_key_is(keys, rn_tuple_hash(&items), items.identity, 3);
        return found;
    }

    static enum rn_weighed rn_weigh_value(struct rn_scale *s, unsigned depth, struct rn_keys *keys)
    {
        uint64_t value;
        uint8_t kind;
        double real;
        float narrow;
        uint32_t bits;

        if (s->bytes > s->most)
            return RN_TOO_MUCH;
        if (s->at == s->end)
            return RN_NO_MSGPACK;
        s->bytes += s->value_bytes;
        kind = *s->at++;
        if (kind <= 0x7f)
            return rn_weigh_number(s, keys, kind, false);
        if (kind >= 0xe0)
            return rn_weigh_number(s, keys, 256 - (uint64_t)kind, true);
        if (kind <= 0x8f)
            return rn_weigh_container(s, depth, keys, kind & 0xf, true);
        if (kind <= 0x9f)
            return rn_weigh_container(s, depth, keys, kind & 0xf, false);
        if (kind <= 0xbf)
            return rn_weigh_bytes(s, keys, kind & 0x1f, true);
        switch (kind) {
        case 0xc0: /* nil */
            rn_key_is(keys, 0, 0, 5);
            return RN_WEIGHED;
        case 0xc2: case 0xc3: /* false and true, which equal 0 and 1 */
            rn_key_is(keys, kind & 1, kind & 1, 0);
            return RN_WEIGHED;
        case 0xc4: case 0xc5: case 0xc6: /* bin */
            return rn_weigh_read(s, 1u << (kind - 0xc4), &value) ? rn_weigh_bytes(s, keys, value, false)
                                                                 : RN_NO_MSGPACK;
        case 0xd9: case 0xda: case 0xdb: /* str */
            return rn_weigh_read(s, 1u << (kind - 0xd9), &value) ? rn_weigh_bytes(s, keys, value, true)
                                                                 : RN_NO_MSGPACK;
        case 0xc7: case 0xc8: case 0xc9: /* ext: of that length, and a byte */
            if (!rn_weigh_read(s, 1u << (kind - 0xc7), &value))
                return RN_NO_MSGPACK;
            return rn_weigh_ext(s, keys, value);
        case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8: /* ext of a fixed length */
            return rn_weigh_ext(s, keys, 1u << (kind - 0xd4));
        case 0xca: /* float */
            if (!rn_weigh_read(s, 4, &value))
                return RN_NO_MSGPACK;
            bits = (uint32_t)value;
            memcpy(&narrow, &bits, sizeof(narrow));
            real = narrow;
            memcpy(&value, &real, sizeof(value));
            return rn_weigh_float(s, keys, real, value);
        case 0xcb:
            if (!rn_weigh_read(s, 8, &value))
                return RN_NO_MSGPACK;
            memcpy(&real, &value, sizeof(real));
            return rn_weigh_float(s, keys, real, value);
        case 0xcc: case 0xcd: case 0xce: case 0xcf: /* uint */
            return rn_weigh_read(s, 1u << (kind - 0xcc), &value) ? rn_weigh_number(s, keys, value, false)
                                                                 : RN_NO_MSGPACK;
        case 0xd0: case 0xd1: case 0xd2: case 0xd3: /* int */
            if (!rn_weigh_read(s, 1u << (kind - 0xd0), &value))
                return RN_NO_MSGPACK;
            if (kind < 0xd3 && value >> ((8u << (kind - 0xd0)) - 1))
                value |= ~0ull << (8u << (kind - 0xd0));
            return (int64_t)value < 0 ? rn_weigh_number(s, keys, 0 - value, true)
                                      : rn_weigh_number(s, keys, value, false);
        case 0xdc: case 0xdd: /* array */
            return rn_weigh_read(s, 2u << (kind - 0xdc), &value) ? rn_weigh_container(s, depth, keys, value, false)
                                                                 : RN_NO_MSGPACK;
        case 0xde: case 0xdf: /* map */
            return rn_weigh_read(s, 2u << (kind - 0xde), &value) ? rn_weigh_container(s, depth, keys, value, true)
                                                                 : RN_NO_MSGPACK;
        }
        return RN_NO_MSGPACK;
    }
    """
    cdef enum rn_weighed:
        RN_WEIGHED, RN_NO_MSGPACK, RN_TOO_DEEP, RN_TOO_MUCH, RN_KEYS_COLLIDE, RN_TAGS_LATE, RN_NO_MEMORY

    cdef struct rn_keys:
        pass

    cdef struct rn_scale:
        const uint8_t *at
        const uint8_t *end
        uint64_t bytes, most, pairs, skipped, skipped_most
        uint32_t container_bytes, text_bytes, value_bytes, number_bytes
        bint has_float_keys, has_set_keys
        int text_keys, has_sets
        const uint8_t *tags
        const uint8_t *tags_end

    uint64_t rn_secret

    const uint64_t RN_SKIPS, RN_SKIPPED_LEAST

    rn_weighed rn_weigh_value(rn_scale *s, unsigned int depth, rn_keys *keys)


rn_secret = int.from_bytes(os.urandom(7), "little") + 2


def weigh(data, uint64_t most, uint32_t container_bytes=72, uint32_t text_bytes=56, *, uint32_t value_bytes=0,
          uint32_t number_bytes=0, int text_keys=0, bint has_float_keys=False, int has_sets=0, bint has_set_keys=False,
          bytes tags=b""):
    """How many bytes of memory the objects will take that a value in msgpack becomes, beside its texts and bytes.

    The value is not checked: what is no msgpack weighs as much as what comes before.

    :param data: a buffer
    :param most: at most so many
    :param container_bytes: what an array or a map makes by itself
    :param text_bytes: the same of a text, or of bytes
    :param value_bytes: what each value makes in addition, whatever it is
    :param number_bytes: what each whole number makes in addition
    :param text_keys: 1 if texts may become keys that are UUIDs, 2 if decimals, whose hashes are not randomized
    :param has_float_keys: whether numbers may become keys that are floats
    :param has_sets: 1 if an array may become a set, 2 if that may be one of tuples
    :param has_set_keys: whether an array that is a key may become a frozenset
    :param tags: the fields that are tags of unions: the length of each in four bytes, as this machine has it, and its
        name
    :raises OverflowError: it is more
    :raises RecursionError: it is nested too deep
    :raises ValueError: it has maps or sets whose keys collide, or maps in each other whose tags come late
    """
    cdef Py_buffer view
    cdef rn_scale scale
    cdef rn_weighed found
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    scale.at = <const uint8_t *>view.buf
    scale.end = scale.at + view.len
    scale.bytes = scale.pairs = scale.skipped = 0
    scale.skipped_most = RN_SKIPS * <uint64_t>view.len + RN_SKIPPED_LEAST
    scale.tags = tags
    scale.tags_end = scale.tags + len(tags)
    scale.most = most
    scale.container_bytes, scale.text_bytes, scale.value_bytes = container_bytes, text_bytes, value_bytes
    scale.number_bytes = number_bytes
    scale.text_keys, scale.has_float_keys, scale.has_sets = text_keys, has_float_keys, has_sets
    scale.has_set_keys = has_set_keys
    found = rn_weigh_value(&scale, 0, NULL)
    PyBuffer_Release(&view)
    if found == RN_TOO_MUCH or scale.bytes > most:
        raise OverflowError(f"more than {most} bytes")
    if found == RN_TOO_DEEP:
        raise RecursionError("it is nested too deep")
    if found == RN_KEYS_COLLIDE:
        raise ValueError("it has maps or sets whose keys collide")
    if found == RN_TAGS_LATE:
        raise ValueError("it has maps in each other whose tags are not their first fields")
    if found == RN_NO_MEMORY:
        raise MemoryError("weigh: there is no memory")
    return scale.bytes
