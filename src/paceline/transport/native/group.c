/* A group of ranks in shared memory: how they wait for each other, and what each collective moves.
 *
 * Every rank has a seat: a counter of finished phases, which the others watch, and two slots of memory for data that the
 * others need. All ranks go through the same phases in the same order, so a rank may overwrite the slot of two phases
 * ago: every rank that has signaled the last phase has read it. Arithmetic is in kernels.c, scheduling in worker.c. */
#define _GNU_SOURCE
#include "group.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Up to this total size of all ranks' vectors, every rank sums everything itself, which saves one phase. */
#define ALONE_BYTES (32 << 10)
/* How long a rank that has its own core spins before it sleeps: SPIN_S in any case, and up to WATCH_S if its caller waits
 * and no other thread wants the core. Another thread wants it if yielding took longer than CROWDED_S. */
#define SPIN_S 20e-6
#define WATCH_S 200e-6
#define CROWDED_S 10e-6
/* How long a rank sleeps before it checks whether the others are alive. */
#define NAP_S 0.05

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX() ((void)0)
#endif

/* -- shared memory -- */

static uint64_t up_to(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

static uint64_t head_bytes(int size) { return up_to(sizeof(segment) + (uint64_t)size * sizeof(seat), 4096); }

uint64_t pln_segment_bytes(int size, uint64_t slot_bytes)
{
    return head_bytes(size) + (uint64_t)size * 2 * up_to(slot_bytes, 4096);
}

void pln_lay_out(pln_group *g, void *shared, uint64_t slot_bytes)
{
    g->shared = shared;
    g->slot_bytes = up_to(slot_bytes, 4096);
    g->slots = (char *)shared + head_bytes(g->size);
    cpu_set_t mine;
    CPU_ZERO(&mine);
    const int cores = sched_getaffinity(0, sizeof mine, &mine) == 0 ? CPU_COUNT(&mine) : 1;
    g->has_core = cores >= g->size;
}

static char *slot_of(pln_group *g, int rank, uint64_t index)
{
    return g->slots + ((uint64_t)rank * 2 + (index & 1)) * g->slot_bytes;
}

/* -- waiting -- */

double pln_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void futex_wait(_Atomic uint32_t *word, uint32_t seen, double seconds)
{
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT, seen, &t, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* The state letter of a process in /proc, and its start time; 0 if it does not exist. */
char pln_read_process(int64_t pid, uint64_t *start)
{
    char path[40], text[1024];
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return errno == ENOENT || errno == ESRCH ? 0 : '?';
    const ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    if (got <= 0)
        return 0;
    text[got] = 0;
    const char *at = strrchr(text, ')'); /* the process name before it may contain anything */
    if (at == NULL || at[1] == 0)
        return '?';
    const char state = at[2];
    unsigned long long started = 0;
    at += 3;
    for (int field = 3; field < 21 && at != NULL; field++)
        at = strchr(at + 1, ' ');
    if (at != NULL)
        sscanf(at, "%llu", &started);
    *start = started;
    return state;
}

/* Mark the group as broken, unless it already is, and wake all ranks. Returns the first reason. */
int pln_break(pln_group *g, int code, int culprit)
{
    uint32_t found = 0, mine = (uint32_t)code | (uint32_t)culprit << 8;
    if (atomic_compare_exchange_strong(&g->shared->broken, &found, mine))
        found = mine;
    for (int r = 0; r < g->size; r++)
        futex_wake(&g->shared->seats[r].progress);
    return (int)(found & 0xff);
}

void pln_break_too(pln_group *g, const pln_group *other)
{
    const uint32_t found = atomic_load(&other->shared->broken);
    if (found != 0)
        pln_break(g, (int)(found & 0xff), (int)(found >> 8));
}

static int is_there(const seat *peer, uint32_t phase)
{
    return (int32_t)(atomic_load_explicit(&peer->progress, memory_order_acquire) - phase) >= 0;
}

/* The state of a peer's process; 0 if it has ended. */
static char look_at_peer(const pln_group *g, int r)
{
    if (!g->sees_processes)
        return kill((pid_t)g->pids[r], 0) != 0 && errno == ESRCH ? 0 : '?';
    uint64_t start = 0;
    const char state = pln_read_process(g->pids[r], &start);
    return state == 'Z' || state == 'X' || (state != '?' && start != g->starts[r]) ? 0 : state;
}

/* An error code if a peer that has not arrived never will, otherwise PLN_OK. */
static int check_peer(pln_group *g, int r, uint32_t phase, double now)
{
    const seat *peer = &g->shared->seats[r];
    double *stopped_since = &g->stopped_since[r];
    if (atomic_load(&peer->has_left))
        return is_there(peer, phase) ? PLN_OK : pln_break(g, PLN_LEFT, r);
    if (g->pids[r] <= 0)
        return PLN_OK;
    const char state = look_at_peer(g, r);
    if (state == 0)
        return is_there(peer, phase) ? PLN_OK : pln_break(g, PLN_DEAD, r);
    if (state != 'T')
        *stopped_since = 0;
    else if (*stopped_since <= 0)
        *stopped_since = now;
    else if (now - *stopped_since > g->stopped_s)
        return pln_break(g, PLN_STOPPED, r);
    return PLN_OK;
}

/* Check all peers that have not arrived, not only the awaited one, which may just be late while another is already
 * dead. */
static int check_peers(pln_group *g, uint32_t phase, double now)
{
    if (g->last_look <= 0 || now - g->last_look > 10 * NAP_S) /* first check, or this process was suspended or starved */
        memset(g->stopped_since, 0, sizeof g->stopped_since);
    else if (now - g->last_look < NAP_S / 2)
        return PLN_OK;
    g->last_look = now;
    for (int step = 1; step < g->size; step++) {
        const int r = (g->rank + step) % g->size;
        const int code = is_there(&g->shared->seats[r], phase) ? PLN_OK : check_peer(g, r, phase, now);
        if (code != PLN_OK)
            return code;
    }
    return PLN_OK;
}

static int look(const seat *peer, uint32_t phase)
{
    for (int i = 0; i < 64; i++) {
        if (is_there(peer, phase))
            return 1;
        RELAX();
    }
    return 0;
}

/* Spin until a peer arrives. Waking a sleeping thread takes tens of microseconds, but spinning must not occupy a core
 * that others need. A rank does not spin for long if it shares its core with the peer, or has just woken it, perhaps on
 * this very core. Each time another thread wants the core, the number of waits that skip the long spin doubles. */
static int look_for_long(pln_group *g, const seat *peer, uint32_t phase, double began)
{
    double now = began;
    do {
        if (look(peer, phase))
            return 1;
        now = pln_now();
    } while (g->has_core && now < began + SPIN_S);
    if (!g->has_core || !g->is_watched || g->has_woken || atomic_load(&peer->core) == (uint32_t)sched_getcpu())
        return 0;
    if (g->num_blind > 0) {
        g->num_blind--;
        return 0;
    }
    while (now < began + WATCH_S) {
        const double before = now;
        sched_yield();
        if (look(peer, phase)) {
            g->num_crowded -= g->num_crowded > 0;
            return 1;
        }
        now = pln_now();
        if (now - before > CROWDED_S) {
            g->num_crowded += g->num_crowded < 8;
            g->num_blind = 1 << g->num_crowded;
            return 0;
        }
    }
    return 0;
}

static int await_peer(pln_group *g, int r, uint32_t phase)
{
    seat *peer = &g->shared->seats[r];
    if (is_there(peer, phase))
        return PLN_OK;
    const double began = pln_now();
    if (look_for_long(g, peer, phase, began))
        return PLN_OK;
    while (!is_there(peer, phase)) {
        const uint32_t broken = atomic_load(&g->shared->broken);
        if (broken != 0)
            return (int)(broken & 0xff);
        if (atomic_load(&g->is_closing))
            return PLN_CLOSED;
        /* Registered before the last check, so that a peer that signals after it sees the sleeper. */
        atomic_fetch_add(&peer->sleepers, 1);
        const uint32_t seen = atomic_load(&peer->progress);
        if ((int32_t)(seen - phase) < 0)
            futex_wait(&peer->progress, seen, NAP_S);
        atomic_fetch_sub(&peer->sleepers, 1);
        const double now = pln_now();
        const int code = now - began > NAP_S / 2 ? check_peers(g, phase, now) : PLN_OK;
        if (code != PLN_OK)
            return code;
        if (now - g->began > g->limit_s && !is_there(peer, phase))
            return pln_break(g, PLN_TIMEOUT, r);
    }
    return PLN_OK;
}

/* Wait until every rank has finished a phase. */
static int await(pln_group *g, uint32_t phase)
{
    g->last_look = 0;
    for (int step = 1; step < g->size; step++) {
        const int code = await_peer(g, (g->rank + step) % g->size, phase);
        if (code != PLN_OK)
            return code;
    }
    return PLN_OK;
}

/* Signal that this rank has finished a phase. Returns the phase number. */
static uint32_t signal_phase(pln_group *g)
{
    seat *mine = &g->shared->seats[g->rank];
    atomic_store_explicit(&mine->core, (uint32_t)sched_getcpu(), memory_order_relaxed);
    atomic_store(&mine->progress, ++g->progress);
    g->has_woken = atomic_load(&mine->sleepers) != 0;
    if (g->has_woken)
        futex_wake(&mine->progress);
    return g->progress;
}

void pln_leave(pln_group *g)
{
    seat *mine = &g->shared->seats[g->rank];
    atomic_store(&mine->has_left, 1);
    futex_wake(&mine->progress);
}

/* -- the first phase of an operation: do all ranks request the same? -- */

static const announcement *asked_by(pln_group *g, int rank) { return &g->shared->seats[rank].asked[g->num_ops & 1]; }

static void ask(pln_group *g, const request *mine)
{
    g->num_ops++;
    g->shared->seats[g->rank].asked[g->num_ops & 1] =
        (announcement){mine->kind, mine->dtype, mine->op, mine->root, mine->arena, mine->count, mine->offset};
}

static int is_same(const announcement *a, const announcement *b)
{
    return a->kind == b->kind && a->dtype == b->dtype && a->op == b->op && a->root == b->root && a->count == b->count;
}

static int meet(pln_group *g, const request *o)
{
    const int code = await(g, o->phase);
    if (code != PLN_OK)
        return code;
    for (int r = 0; r < g->size; r++)
        if (!is_same(asked_by(g, r), asked_by(g, 0)))
            return pln_break(g, PLN_MISMATCH, r); /* every rank finds the same culprit */
    return PLN_OK;
}

/* -- the collectives -- */

typedef struct {
    size_t begin, end;
} span;

/* How many of `count` elements one rank sums. No two ranks share a cache line. */
static size_t share_of(size_t count, int size, size_t wide)
{
    return (size_t)up_to((count + (size_t)size - 1) / (size_t)size, LINE_BYTES / wide);
}

/* One rank's part of `count` elements, in parts of `each`. */
static span part_of(size_t count, size_t each, int rank)
{
    const size_t begin = each * (size_t)rank < count ? each * (size_t)rank : count;
    return (span){begin, count - begin < each ? count : begin + each};
}

static void copy(void *to, const void *from, size_t bytes)
{
    if (bytes != 0) /* an empty tensor has no address */
        memcpy(to, from, bytes);
}

static int is_shared(pln_group *g)
{
    const announcement *first = asked_by(g, 0);
    for (int r = 0; r < g->size; r++)
        if (asked_by(g, r)->arena == 0 || asked_by(g, r)->arena != first->arena ||
            asked_by(g, r)->offset != first->offset)
            return 0;
    return 1;
}

static int is_any_shared(pln_group *g)
{
    for (int r = 0; r < g->size; r++)
        if (asked_by(g, r)->arena != 0)
            return 1;
    return 0;
}

static int is_alone(const pln_group *g, const request *o)
{
    const size_t bytes = o->count * pln_element_bytes(o->dtype);
    return bytes * (size_t)g->size <= ALONE_BYTES && bytes <= g->slot_bytes;
}

/* Small vectors: every rank publishes its data, and sums everything itself. */
static int reduce_alone(pln_group *g, const request *o)
{
    const void *src[PLN_MAX_RANKS];
    void *dst[1] = {o->out};
    for (int r = 0; r < g->size; r++)
        src[r] = slot_of(g, r, g->stage);
    g->stage++;
    pln_reduce(o->dtype, o->op, dst, 1, src, g->size, o->count, g->size);
    return PLN_OK;
}

/* In an arena: each rank sums its part and writes it to all ranks. */
static int reduce_in_place(pln_group *g, const request *o)
{
    const void *src[PLN_MAX_RANKS];
    void *dst[PLN_MAX_RANKS];
    const size_t wide = pln_element_bytes(o->dtype);
    const span mine = part_of(o->count, share_of(o->count, g->size, wide), g->rank);
    const arena *where = &g->where;
    for (int r = 0; r < g->size; r++)
        src[r] = dst[r] = where->base + (uint64_t)r * where->part_bytes + o->offset + mine.begin * wide;
    pln_reduce(o->dtype, o->op, dst, g->size, src, g->size, mine.end - mine.begin, g->size);
    return await(g, signal_phase(g));
}

/* A vector in chunks, each split at the same offsets. The slot space of one rank's sums of a chunk stays unused in the
 * chunk after next, because another rank may still be fetching them. */
typedef struct {
    const request *asked;
    size_t wide, chunk, each, num_chunks;
} cut;

static cut cut_up(pln_group *g, const request *o)
{
    const size_t wide = pln_element_bytes(o->dtype), fitting = g->slot_bytes / wide;
    const size_t num_chunks = (o->count + fitting - 1) / fitting;
    const size_t chunk = (size_t)up_to((o->count + num_chunks - 1) / num_chunks, LINE_BYTES / wide);
    return (cut){o, wide, chunk, share_of(chunk, g->size, wide), num_chunks};
}

/* A rank's part of chunk `i`, in elements of the whole vector. */
static span part_of_chunk(const cut *c, size_t i, int rank)
{
    const size_t at = i * c->chunk, left = c->asked->count > at ? c->asked->count - at : 0;
    const span part = part_of(left < c->chunk ? left : c->chunk, c->each, rank);
    return (span){at + part.begin, at + part.end};
}

/* The address of that part in a rank's slot. */
static char *in_slot(pln_group *g, const cut *c, size_t i, int rank, span part)
{
    return slot_of(g, rank, g->stage + i) + (part.begin - i * c->chunk) * c->wide;
}

/* Copy to the slot the parts of chunk `i` that the other ranks sum. */
static void stage_chunk(pln_group *g, const cut *c, size_t i)
{
    for (int step = 1; step < g->size; step++) {
        const span part = part_of_chunk(c, i, (g->rank + step) % g->size);
        copy(in_slot(g, c, i, g->rank, part), (const char *)c->asked->in + part.begin * c->wide,
             (part.end - part.begin) * c->wide);
    }
}

/* Sum this rank's part, directly into the output and, for the other ranks, into the slot. */
static void reduce_chunk(pln_group *g, const cut *c, size_t i)
{
    const span mine = part_of_chunk(c, i, g->rank);
    const void *src[PLN_MAX_RANKS];
    for (int r = 0; r < g->size; r++)
        src[r] = in_slot(g, c, i, r, mine);
    src[g->rank] = (const char *)c->asked->in + mine.begin * c->wide;
    void *dst[2] = {(char *)c->asked->out + mine.begin * c->wide, in_slot(g, c, i, g->rank, mine)};
    pln_reduce(c->asked->dtype, c->asked->op, dst, 2, src, g->size, mine.end - mine.begin, g->size);
}

static void fetch_chunk(pln_group *g, const cut *c, size_t i)
{
    for (int step = 1; step < g->size; step++) {
        const int r = (g->rank + step) % g->size;
        const span part = part_of_chunk(c, i, r);
        copy((char *)c->asked->out + part.begin * c->wide, in_slot(g, c, i, r, part), (part.end - part.begin) * c->wide);
    }
}

/* Outside of arenas: through the slots, in cache-sized chunks. Each chunk is staged before the previous one is fetched. */
static int reduce_through_slots(pln_group *g, const cut *c)
{
    int code = PLN_OK;
    for (size_t i = 0; i < c->num_chunks && code == PLN_OK; i++) {
        uint32_t is_out = 0;
        reduce_chunk(g, c, i);
        const uint32_t is_reduced = signal_phase(g);
        if (i + 1 < c->num_chunks) {
            stage_chunk(g, c, i + 1);
            is_out = signal_phase(g);
        }
        code = await(g, is_reduced);
        if (code == PLN_OK)
            fetch_chunk(g, c, i);
        if (code == PLN_OK && i + 1 < c->num_chunks)
            code = await(g, is_out);
    }
    g->stage += c->num_chunks;
    return code;
}

static int all_reduce(pln_group *g, const request *o)
{
    if (is_alone(g, o))
        return reduce_alone(g, o);
    if (is_shared(g))
        return reduce_in_place(g, o);
    const cut c = cut_up(g, o);
    if (is_any_shared(g)) { /* some ranks use an arena, and have not staged their first chunk yet */
        stage_chunk(g, &c, 0);
        const int is_out = await(g, signal_phase(g));
        if (is_out != PLN_OK)
            return is_out;
    }
    return reduce_through_slots(g, &c);
}

/* How many elements of each rank's part fit into a slot. */
static size_t scatter_chunk(const pln_group *g, const request *o)
{
    return g->slot_bytes / (pln_element_bytes(o->dtype) * (size_t)g->size);
}

static void stage_scatter(pln_group *g, const request *o, size_t at)
{
    const size_t wide = pln_element_bytes(o->dtype), chunk = scatter_chunk(g, o);
    const size_t count = o->count - at < chunk ? o->count - at : chunk;
    for (int step = 1; step < g->size; step++) {
        const size_t r = (size_t)((g->rank + step) % g->size);
        copy(slot_of(g, g->rank, g->stage) + r * chunk * wide, (const char *)o->in + (r * o->count + at) * wide,
             count * wide);
    }
}

static int reduce_scatter(pln_group *g, const request *o)
{
    const size_t wide = pln_element_bytes(o->dtype), chunk = scatter_chunk(g, o);
    const void *src[PLN_MAX_RANKS];
    for (size_t at = 0; at == 0 || at < o->count; at += chunk) {
        const size_t count = o->count - at < chunk ? o->count - at : chunk;
        if (at != 0) {
            stage_scatter(g, o, at);
            const int code = await(g, signal_phase(g));
            if (code != PLN_OK)
                return code;
        }
        for (int r = 0; r < g->size; r++)
            src[r] = slot_of(g, r, g->stage) + (size_t)g->rank * chunk * wide;
        src[g->rank] = (const char *)o->in + ((size_t)g->rank * o->count + at) * wide;
        void *dst[1] = {(char *)o->out + at * wide};
        pln_reduce(o->dtype, o->op, dst, 1, src, g->size, count, g->size);
        g->stage++;
    }
    return PLN_OK;
}

/* Stage bytes of an all-gather or broadcast, from `at` until the slot is full. In a broadcast, only the root does. */
static size_t stage_bytes(pln_group *g, const request *o, size_t at)
{
    const size_t left = o->count * pln_element_bytes(o->dtype) - at, count = left < g->slot_bytes ? left : g->slot_bytes;
    if (o->kind == PLN_ALL_GATHER || g->rank == o->root)
        copy(slot_of(g, g->rank, g->stage), (const char *)o->in + at, count);
    return count;
}

static void fetch_gathered(pln_group *g, const request *o, size_t at, size_t count)
{
    const size_t bytes = o->count * pln_element_bytes(o->dtype);
    /* The input may be this rank's part of the output. */
    if (count != 0)
        memmove((char *)o->out + (size_t)g->rank * bytes + at, (const char *)o->in + at, count);
    for (int step = 1; step < g->size; step++) {
        const int r = (g->rank + step) % g->size;
        copy((char *)o->out + (size_t)r * bytes + at, slot_of(g, r, g->stage), count);
    }
}

static int move_bytes(pln_group *g, const request *o)
{
    const size_t bytes = o->count * pln_element_bytes(o->dtype);
    size_t count = bytes < g->slot_bytes ? bytes : g->slot_bytes;
    for (size_t at = 0; at == 0 || at < bytes; at += g->slot_bytes) {
        if (at != 0) {
            count = stage_bytes(g, o, at);
            const int code = await(g, signal_phase(g));
            if (code != PLN_OK)
                return code;
        }
        if (o->kind == PLN_ALL_GATHER)
            fetch_gathered(g, o, at, count);
        else if (g->rank != o->root)
            copy((char *)o->out + at, slot_of(g, o->root, g->stage), count);
        g->stage++;
    }
    return PLN_OK;
}

/* Find the arena of the vector, if any. The thread that runs the operation keeps that memory alive. */
static void find_arena(pln_group *g, request *o)
{
    const char *at = o->out;
    o->arena = 0;
    if (o->kind != PLN_ALL_REDUCE || o->in != o->out || is_alone(g, o))
        return;
    pthread_mutex_lock(&g->lock);
    for (int a = 0; a < PLN_MAX_ARENAS; a++) {
        const char *mine = g->arenas[a].base + (uint64_t)g->rank * g->arenas[a].part_bytes;
        if (g->arenas[a].serial != 0 && at >= mine &&
            at + o->count * pln_element_bytes(o->dtype) <= mine + g->arenas[a].part_bytes) {
            g->where = g->arenas[a];
            o->arena = g->where.serial;
            o->offset = (uint64_t)(at - mine);
        }
    }
    pthread_mutex_unlock(&g->lock);
}

/* Whether a rank that has staged its data only needs to read, so that no other rank waits for it any longer. */
int pln_is_short(const pln_group *g, const request *o)
{
    return o->kind == PLN_BARRIER || (o->kind != PLN_REDUCE_SCATTER && is_alone(g, o));
}

int pln_can_finish(const pln_group *g, const request *o)
{
    for (int r = 0; r < g->size; r++)
        if (!is_there(&g->shared->seats[r], o->phase))
            return 0;
    return 1;
}

/* Announce the operation, and stage the data that the others need first. Never waits. */
void pln_put_out(pln_group *g, request *o)
{
    o->began = pln_now();
    find_arena(g, o);
    ask(g, o);
    if (o->kind == PLN_ALL_REDUCE && is_alone(g, o)) {
        copy(slot_of(g, g->rank, g->stage), o->in, o->count * pln_element_bytes(o->dtype));
    } else if (o->kind == PLN_ALL_REDUCE && o->arena == 0) {
        const cut c = cut_up(g, o);
        stage_chunk(g, &c, 0);
    } else if (o->kind == PLN_REDUCE_SCATTER) {
        stage_scatter(g, o, 0);
    } else if (o->kind == PLN_ALL_GATHER || o->kind == PLN_BROADCAST) {
        stage_bytes(g, o, 0);
    }
    o->phase = signal_phase(g);
    o->is_out = 1;
}

int pln_execute(pln_group *g, request *o, int is_watched)
{
    const uint32_t broken = atomic_load(&g->shared->broken);
    if (broken != 0)
        return (int)(broken & 0xff);
    if (!o->is_out)
        pln_put_out(g, o);
    g->began = o->began, g->is_watched = is_watched;
    g->limit_s = o->timeout_s > 0 ? o->timeout_s : g->timeout_s;
    const int code = meet(g, o);
    if (code != PLN_OK)
        return code;
    switch (o->kind) {
    case PLN_ALL_REDUCE:
        return all_reduce(g, o);
    case PLN_REDUCE_SCATTER:
        return reduce_scatter(g, o);
    case PLN_ALL_GATHER:
    case PLN_BROADCAST:
        return move_bytes(g, o);
    default:
        return PLN_OK;
    }
}

/* -- error messages -- */

static void describe(const pln_group *g, const announcement *o, char *text, size_t bytes)
{
#define NAME(id, name) name,
    static const char *const kinds[] = {PLN_KINDS(NAME)}, *const dtypes[] = {PLN_DTYPES(NAME)},
                            *const ops[] = {PLN_OPS(NAME)};
#undef NAME
    if (o->kind == PLN_BARRIER && o->count == 0)
        snprintf(text, bytes, "a barrier");
    else if (o->kind == PLN_BARRIER)
        snprintf(text, bytes, "an allocation of %llu bytes", (unsigned long long)o->count);
    else if (o->kind == PLN_BROADCAST)
        snprintf(text, bytes, "a broadcast of %llu %s from rank %d", (unsigned long long)o->count, dtypes[o->dtype],
                 g->names[o->root]);
    else if (o->kind == PLN_ALL_GATHER)
        snprintf(text, bytes, "an all-gather of %llu %s", (unsigned long long)o->count, dtypes[o->dtype]);
    else
        snprintf(text, bytes, "%s %s (%s) of %llu %s", o->kind == PLN_ALL_REDUCE ? "an" : "a", kinds[o->kind], ops[o->op],
                 (unsigned long long)o->count, dtypes[o->dtype]);
}

void pln_format_error(pln_group *g, char *text, size_t bytes)
{
    const uint32_t broken = atomic_load(&g->shared->broken);
    const int code = (int)(broken & 0xff), culprit = (int)(broken >> 8);
    const long long pid = culprit < g->size ? (long long)g->pids[culprit] : 0;
    const int name = culprit < g->size ? g->names[culprit] : 0;
    char here[96], there[96];
    switch (code) {
    case PLN_OK:
        snprintf(text, bytes, "the group is closed");
        break;
    case PLN_DEAD:
        snprintf(text, bytes, "rank %d (process %lld) has died", name, pid);
        break;
    case PLN_STOPPED:
        snprintf(text, bytes, "rank %d (process %lld) is stopped", name, pid);
        break;
    case PLN_LEFT:
        snprintf(text, bytes, "rank %d (process %lld) has closed its group", name, pid);
        break;
    case PLN_TIMEOUT:
        snprintf(text, bytes, "rank %d (process %lld) did not arrive within the time limit", name, pid);
        break;
    case PLN_MISMATCH:
        describe(g, asked_by(g, 0), here, sizeof here);
        describe(g, asked_by(g, culprit), there, sizeof there);
        snprintf(text, bytes, "ranks called different operations: rank %d %s, rank %d %s", g->names[0], here, name,
                 there);
        break;
    default:
        snprintf(text, bytes, "the group has failed (%d)", code);
    }
}
