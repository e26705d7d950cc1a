/*
 * The keys of maps and sets, and whether they collide: what weighing.pyx says of keys.
 *
 * Those with known hashes are kept until the map is complete, and then put into tables of all sizes that it may have
 * had. A tuple has its hash from those of its items, as they come.
 */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
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
