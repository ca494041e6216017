/* One operation of the fuzz program: its kind, the location of its vectors on a rank, and the check of its result. */
#ifndef PACELINE_OPERATIONS_H
#define PACELINE_OPERATIONS_H

#include "group.h"
#include "reference.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_RANKS 6
#define MOST_GROUPS 2
#define NUM_ARENAS 2
#define WINDOW 6
#define GUARD 48
#define TIMEOUT_S 60.0

enum { END_CLOSE, END_MISMATCH, END_LEAVE, END_KILL };

#define FAIL(...)                                                                                                      \
    do {                                                                                                               \
        fprintf(stderr, "seed %llu, round %d: ", (unsigned long long)the_seed, the_round);                             \
        fprintf(stderr, __VA_ARGS__);                                                                                  \
        fprintf(stderr, "\n");                                                                                         \
        abort();                                                                                                       \
    } while (0)

static uint64_t the_seed;
static int the_round;

/* -- one round: the state shared by all ranks -- */

typedef struct {
    uint64_t seed, slot_bytes, part_bytes;
    int size, num_groups, num_ops, ending, culprit, is_apart;
    uint32_t first_phase;
    char *segments[MOST_GROUPS], *arenas[MOST_GROUPS][NUM_ARENAS];
    _Atomic int64_t *pids; /* shared: 0 until known; negative for threads, which are not monitored */
    _Atomic uint64_t *num_done;
} round_plan;

typedef struct {
    int kind, dtype, op, root;
    uint64_t count, salt;
    int arenas_used; /* 0: by no rank, 1: by all at the same offset, 2: by some, 3: at any offset */
    uint64_t arena_offset;
} operation;

static operation draw_operation(const round_plan *plan, uint64_t *state)
{
    operation o = {.kind = (int)below(state, PLN_NUM_KINDS), .op = (int)below(state, PLN_NUM_OPS)};
    if (below(state, 3) == 0)
        o.kind = PLN_ALL_REDUCE;
    const int is_sum = o.kind == PLN_ALL_REDUCE || o.kind == PLN_REDUCE_SCATTER;
    o.dtype = (int)below(state, is_sum ? PLN_U8 : PLN_NUM_DTYPES);
    if (is_sum && o.op == PLN_ROUNDED)
        o.dtype = PLN_F32;
    o.root = (int)below(state, (uint64_t)plan->size);
    o.salt = next(state);
    const uint64_t in_slot = plan->slot_bytes / pln_element_bytes(o.dtype);
    const uint64_t in_share = in_slot / (uint64_t)plan->size;
    switch (below(state, 6)) {
    case 0: o.count = below(state, 4); break;
    case 1: o.count = below(state, 300); break;
    case 2: o.count = in_slot * (1 + below(state, 3)) + below(state, 5) - 2; break;
    case 3: o.count = in_share * (1 + below(state, 3)) + below(state, 5) - 2; break;
    case 4: o.count = (below(state, 4) ? 2000 : 32 << 10) / pln_element_bytes(o.dtype) + below(state, 5) - 2; break;
    default: o.count = below(state, 4 * below(state, in_slot) + 1); break;
    }
    if (o.kind == PLN_BARRIER)
        o.count = 0;
    o.arenas_used = o.kind == PLN_ALL_REDUCE ? (int)below(state, 4) : 0;
    o.arena_offset = below(state, 200);
    return o;
}

/* -- one operation on one rank -- */

typedef struct {
    operation asked;
    char *memory, *in, *out;
    uint64_t in_bytes, out_bytes;
    int is_own, is_in_place, number;
    int64_t ticket; /* 0: none */
} flight;

static uint64_t parts_in(const operation *o, int size) { return o->kind == PLN_REDUCE_SCATTER ? (uint64_t)size : 1; }
static uint64_t parts_out(const operation *o, int size) { return o->kind == PLN_ALL_GATHER ? (uint64_t)size : 1; }

static void prepare(const round_plan *plan, int rank, int group, flight *f, uint64_t *mine)
{
    const operation *o = &f->asked;
    const uint64_t wide = pln_element_bytes(o->dtype);
    f->in_bytes = parts_in(o, plan->size) * o->count * wide, f->out_bytes = parts_out(o, plan->size) * o->count * wide;
    const int may_be_one = o->kind != PLN_BARRIER;
    f->is_in_place = o->kind == PLN_BROADCAST || (may_be_one && below(mine, 2));
    f->is_own = 1;
    const uint64_t room = f->in_bytes + f->out_bytes + 6 * GUARD + 16;
    if (o->arenas_used == 1 || (o->arenas_used >= 2 && below(mine, 2))) {
        const uint64_t at = o->arena_offset + (o->arenas_used == 3 ? 1 + below(mine, 50) : 0);
        /* Concurrent operations need separate memory: each one in the window has its own part. */
        const uint64_t each = plan->part_bytes / WINDOW;
        if (at + f->in_bytes + 2 * GUARD <= each) {
            char *part = plan->arenas[group][o->salt % NUM_ARENAS] + (uint64_t)rank * plan->part_bytes;
            f->is_own = 0, f->is_in_place = 1;
            f->memory = part + (uint64_t)(f->number % WINDOW) * each;
            f->in = f->memory + at;
            memset(f->memory, 0xa5, each);
        }
    }
    if (f->is_own) {
        f->memory = malloc(room);
        memset(f->memory, 0xa5, room);
        f->in = f->memory + GUARD + below(mine, 16);
    }
    /* In place, the smaller vector is this rank's part of the larger one. */
    f->out = f->in;
    if (!f->is_in_place)
        f->out = f->in + f->in_bytes + GUARD + below(mine, 16);
    else if (o->kind == PLN_REDUCE_SCATTER)
        f->out = f->in + (uint64_t)rank * f->out_bytes;
    else if (o->kind == PLN_ALL_GATHER)
        f->in = f->out + (uint64_t)rank * f->in_bytes;
    for (uint64_t i = 0; i < parts_in(o, plan->size) * o->count; i++)
        put_number(o->dtype, f->in + i * wide, number_of(o->dtype, o->salt, rank, i));
}

static void expect(const operation *o, int rank, int size, uint64_t i, char *wanted)
{
    if (o->kind == PLN_BROADCAST)
        put_number(o->dtype, wanted, number_of(o->dtype, o->salt, o->root, i));
    else if (o->kind == PLN_ALL_GATHER)
        put_number(o->dtype, wanted, number_of(o->dtype, o->salt, (int)(i / o->count), i % o->count));
    else
        reduce_numbers(o->dtype, o->op, o->salt, size, o->kind == PLN_REDUCE_SCATTER ? (uint64_t)rank * o->count + i : i,
                       wanted);
}

static void check_guard(const char *at, uint64_t bytes, const char *where)
{
    for (uint64_t i = 0; i < bytes; i++)
        if ((unsigned char)at[i] != 0xa5)
            FAIL("byte %llu %s was written", (unsigned long long)i, where);
}

static void verify(const round_plan *plan, int rank, const flight *f)
{
    const operation *o = &f->asked;
    const uint64_t wide = pln_element_bytes(o->dtype), num_out = parts_out(o, plan->size) * o->count;
    char wanted[8];
    for (uint64_t i = 0; i < num_out; i++) {
        expect(o, rank, plan->size, i, wanted);
        if (!is_same_number(o->dtype, wanted, f->out + i * wide))
            FAIL("rank %d of %d, operation %d (kind %d, type %d, reduction %d, %llu elements): element %llu is wrong", rank,
                 plan->size, f->number, o->kind, o->dtype, o->op, (unsigned long long)o->count, (unsigned long long)i);
    }
    const char *first = f->in < f->out ? f->in : f->out;
    const char *end_in = f->in + f->in_bytes, *end_out = f->out + f->out_bytes, *last = end_in > end_out ? end_in : end_out;
    check_guard(f->memory, (uint64_t)(first - f->memory), "before a vector");
    check_guard(last, GUARD, "after a vector");
    if (!f->is_in_place) {
        check_guard(end_in, GUARD, "between the vectors");
        for (uint64_t i = 0; i < parts_in(o, plan->size) * o->count; i++) {
            put_number(o->dtype, wanted, number_of(o->dtype, o->salt, rank, i));
            if (!is_same_number(o->dtype, wanted, f->in + i * wide))
                FAIL("the input of operation %d has changed", f->number);
        }
    }
}

#endif
