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
    #include <math.h>
    #include <stdbool.h>
    #include <stdlib.h>
    #include <string.h>

    enum {
        RN_WEIGH_DEPTH = 1024, /* more than the decoder goes down */
        RN_KEYS_FEW = 64,      /* they may collide as they want */
        RN_KEYS_MOST = 2048,
        RN_PAIRS_MOST = 2 * RN_KEYS_MOST * RN_KEYS_MOST, /* of them, in all maps together */
        RN_COLLISIONS = 32,
        RN_SKIPS = 16, /* of each byte of a message, on average, */
        RN_SKIPPED_LEAST = 1 << 20, /* after so many bytes */
        RN_EXT_TIME = 0xff, /* the kind of ext that is a point in time */
        RN_SLOT_BYTES = 8,
        RN_ENTRY_BYTES = 104, /* of a dictionary that has just grown */
        RN_DICT_BYTES = 240,
        RN_WIDE_BYTES = 32, /* more than a text in ASCII */
    };

    enum rn_weighed { RN_WEIGHED, RN_NO_MSGPACK, RN_TOO_DEEP, RN_TOO_MUCH, RN_KEYS_COLLIDE, RN_TAGS_LATE, RN_NO_MEMORY };

    struct rn_key {
        uint64_t hash, value, high; /* keys that have the same value are equal */
    };

    struct rn_keys {
        struct rn_key *keys; /* with known hashes; NULL if there are few */
        uint32_t count, unknown;
        bool are_of_map;
        bool are_of_tuple; /* which is a key itself: of these items it has its hash */
        uint64_t hash, identity, items;
        const uint8_t *untagged; /* where a map begins whose tag has not come */
    };

    static uint64_t rn_secret; /* less than the modulus of hashes, and known to no sender */

    struct rn_scale {
        const uint8_t *at, *end;
        uint64_t bytes, most;
        uint32_t container_bytes, text_bytes, value_bytes, number_bytes;
        uint64_t pairs; /* of keys that may collide, as nobody knows better */
        bool has_float_keys;
        int text_keys; /* 1: may be UUIDs; 2: decimals, too */
        int has_sets; /* 1: of numbers and texts; 2: of tuples, too */
        bool has_set_keys; /* an array that is a key may become a frozenset, whose hash is not computed here */
        const uint8_t *tags, *tags_end; /* names of fields, each after its length in four bytes */
        uint64_t skipped, skipped_most;
    };

    #define RN_HASH_BITS 61
    #define RN_HASH_MODULUS ((1ull << RN_HASH_BITS) - 1)
    #define RN_TUPLE_BEGINS 2870177450012600261ull

    /* As hash(int); the sign apart. */
    static uint64_t rn_hash_signed(uint64_t magnitude, bool negative)
    {
        uint64_t hash = magnitude % RN_HASH_MODULUS;

        if (!negative)
            return hash;
        return hash == 1 ? -2ull : 0 - hash; /* -1 stands for an error */
    }

    /* As hash(float) of a finite number. */
    static uint64_t rn_hash_double(double value)
    {
        int exponent;
        double m = frexp(fabs(value), &exponent);
        uint64_t x = 0, y;

        while (m != 0) {
            x = ((x << 28) & RN_HASH_MODULUS) | x >> (RN_HASH_BITS - 28);
            m *= 268435456.0; /* 2**28 */
            exponent -= 28;
            y = (uint64_t)m;
            m -= (double)y;
            x += y;
            if (x >= RN_HASH_MODULUS)
                x -= RN_HASH_MODULUS;
        }
        exponent = exponent >= 0 ? exponent % RN_HASH_BITS : RN_HASH_BITS - 1 - (-1 - exponent) % RN_HASH_BITS;
        x = ((x << exponent) & RN_HASH_MODULUS) | x >> (RN_HASH_BITS - exponent);
        return rn_hash_signed(x, value < 0);
    }

    /* Put the first keys into a table of this size, as many as CPython would, and see whether that takes too long. */
    static bool rn_keys_collide_in(const struct rn_keys *k, uint32_t *table, uint64_t size, unsigned linear)
    {
        uint64_t mask = size - 1, steps = 0, usable = size * 2 / 3, most;
        uint32_t count = k->count < usable ? k->count : (uint32_t)usable;

        most = (uint64_t)count * RN_COLLISIONS * (linear ? 4 : 1); /* neighbours cost little */
        memset(table, 0, size * sizeof(*table));
        for (uint32_t n = 0; n < count; n++) {
            const struct rn_key *key = &k->keys[n], *other;
            uint64_t perturb = key->hash, i = key->hash & mask;

            for (;;) {
                unsigned probes = i + linear <= mask ? linear : 0;
                uint64_t j = i;

                for (;; j++) {
                    if (!table[j])
                        break;
                    other = &k->keys[table[j] - 1];
                    if (other->value == key->value && other->high == key->high)
                        break;
                    if (++steps > most)
                        return true;
                    if (j - i == probes) {
                        j = size;
                        break;
                    }
                }
                if (j < size) {
                    table[j] = n + 1;
                    break;
                }
                perturb >>= 5;
                i = (i * 5 + perturb + 1) & mask;
            }
        }
        return false;
    }

    static enum rn_weighed rn_keys_try(struct rn_scale *s, const struct rn_keys *k, unsigned linear)
    {
        uint64_t largest = 8;
        uint32_t *table;
        bool collide = false;

        s->pairs += (uint64_t)k->unknown * k->unknown;
        if (k->unknown > RN_KEYS_MOST || s->pairs > RN_PAIRS_MOST)
            return RN_KEYS_COLLIDE;
        if (k->count < RN_KEYS_FEW)
            return RN_WEIGHED;
        while (largest * 2 / 3 < k->count)
            largest *= 2;
        largest *= 4; /* a table may grow by four at a time */
        table = malloc(largest * sizeof(*table));
        if (!table)
            return RN_NO_MEMORY;
        for (uint64_t size = RN_KEYS_FEW; size <= largest && !collide; size *= 2)
            collide = rn_keys_collide_in(k, table, size, linear);
        free(table);
        return collide ? RN_KEYS_COLLIDE : RN_WEIGHED;
    }

    /* What is equal has the same identity, and what a sender has made that differs has another. */
    static uint64_t rn_identity(uint64_t before, uint64_t value)
    {
        before = (uint64_t)(((unsigned __int128)before * rn_secret + (value >> 32)) % RN_HASH_MODULUS);
        return (uint64_t)(((unsigned __int128)before * rn_secret + (uint32_t)value) % RN_HASH_MODULUS);
    }

    /* The hash of a tuple, as CPython computes it: item by item, and the end. */
    static void rn_tuple_goes_on(struct rn_keys *tuple, uint64_t hash, uint64_t value, uint64_t high)
    {
        tuple->hash += hash * 14029467366897019727ull;
        tuple->hash = (tuple->hash << 31 | tuple->hash >> 33) * 11400714785074694791ull;
        tuple->identity = rn_identity(rn_identity(tuple->identity, value), high);
        tuple->items++;
    }

    static uint64_t rn_tuple_hash(const struct rn_keys *tuple)
    {
        return tuple->hash + (tuple->items ^ (RN_TUPLE_BEGINS ^ 3527539ull));
    }

    static void rn_key_is(struct rn_keys *keys, uint64_t hash, uint64_t value, uint64_t high)
    {
        if (keys && keys->are_of_tuple)
            rn_tuple_goes_on(keys, hash, value, high);
        if (keys && keys->keys)
            keys->keys[keys->count++] = (struct rn_key){hash, value, high};
    }

    /* A key with a hash that nobody knows, and that differs from others' hashes. In a tuple it does not differ. */
    static void rn_key_is_random(struct rn_keys *keys, const uint8_t *at, uint64_t length)
    {
        uint64_t identity = length, word;

        if (!keys || !keys->are_of_tuple)
            return;
        for (; length; at += sizeof(word), length -= length < sizeof(word) ? length : sizeof(word)) {
            word = 0;
            memcpy(&word, at, length < sizeof(word) ? length : sizeof(word));
            identity = rn_identity(identity, word);
        }
        rn_tuple_goes_on(keys, identity, identity, 4);
    }

    static void rn_key_is_unknown(struct rn_keys *keys)
    {
        if (keys)
            keys->unknown++;
    }

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

    /*
     * A text or bytes as a key. If it may be a UUID, hexadecimal digits or 16 bytes, its hash is that of the number. If
     * it may be a decimal, it does not begin with a letter.
     */
    static void rn_key_is_text(struct rn_scale *s, struct rn_keys *keys, const uint8_t *at, uint64_t length,
                               bool is_text)
    {
        uint64_t high = 0, low = 0;
        unsigned digits = 0;
        int digit = 0;

        if (s->text_keys > 1 && is_text && (!length || (*at | 0x20) < 'a' || (*at | 0x20) > 'z'))
            return rn_key_is_unknown(keys);
        for (uint64_t i = 0; s->text_keys && i < length && length <= 36; i++) {
            if (!is_text) {
                high = high << 8 | low >> 56;
                low = low << 8 | at[i];
                digits += 2;
                continue;
            }
            if (at[i] == '-')
                continue;
            digit = at[i] <= '9' ? at[i] - '0' : (at[i] | 0x20) - 'a' + 10;
            if (digit < 0 || digit > 15)
                break;
            high = high << 4 | low >> 60;
            low = low << 4 | (unsigned)digit;
            digits++;
        }
        if (digits == 32 && digit >= 0 && digit <= 15)
            rn_key_is(keys, (uint64_t)(((unsigned __int128)high << 64 | low) % RN_HASH_MODULUS), low, high);
        else
            rn_key_is_random(keys, at, length);
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
