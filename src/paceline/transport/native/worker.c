/* Runs operations in submission order, on a worker thread or on the thread that waits for them. A short operation with
 * nothing ahead of it is staged immediately and finished by the thread that waits for it, so that no thread is woken. The
 * operations themselves are in group.c. */
#define _GNU_SOURCE
#include "group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* glibc 2.34 gave these functions new symbol versions. Wheels link to the old versions, to support older glibc. */
#if defined(PLN_OLD_GLIBC)
#if defined(__x86_64__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_join, pthread_join@GLIBC_2.2.5");
__asm__(".symver pthread_condattr_setclock, pthread_condattr_setclock@GLIBC_2.3.3");
#elif defined(__aarch64__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.17");
__asm__(".symver pthread_join, pthread_join@GLIBC_2.17");
__asm__(".symver pthread_condattr_setclock, pthread_condattr_setclock@GLIBC_2.17");
#endif
#endif

static void conclude(pln_group *g, int code)
{
    g->finished++;
    if (code != PLN_OK && g->first_failed == 0) {
        g->first_failed = g->finished;
        g->failure = code;
    }
    g->is_busy = 0;
    pthread_cond_broadcast(&g->has_result);
}

/* Lock held, nothing running: run the next operation on this thread. */
static void run_next(pln_group *g, int is_watched)
{
    request next = g->queue[g->finished % g->queue_length];
    g->is_busy = 1;
    pthread_mutex_unlock(&g->lock);
    const int code = pln_execute(g, &next, is_watched);
    pthread_mutex_lock(&g->lock);
    conclude(g, code);
    if (g->finished < g->entrusted)
        pthread_cond_signal(&g->has_work); /* the worker may have checked while this ran */
}

static void *work(void *argument)
{
    pln_group *g = argument;
    pthread_mutex_lock(&g->lock);
    for (;;) {
        while (!atomic_load(&g->is_closing) && (g->is_busy || g->finished >= g->entrusted))
            pthread_cond_wait(&g->has_work, &g->lock);
        if (atomic_load(&g->is_closing))
            break;
        run_next(g, 0);
    }
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

/* Lock held: leave everything that has not begun to the worker. */
static int entrust(pln_group *g)
{
    if (!g->has_worker) {
        if (pthread_create(&g->worker, NULL, work, g) != 0)
            return PLN_BAD;
        g->has_worker = 1;
    }
    g->entrusted = g->submitted;
    pthread_cond_signal(&g->has_work);
    return PLN_OK;
}

/* Whether /proc exists and belongs to this process's PID namespace. */
static int sees_processes(void)
{
    char own[24] = {0};
    return readlink("/proc/self", own, sizeof own - 1) > 0 && strtoll(own, NULL, 10) == getpid();
}

int pln_version(void) { return PLN_VERSION; }

#define NAME(id, name) " " #id
const char *pln_constants(void)
{
    return "kinds" PLN_KINDS(NAME) "\ndtypes" PLN_DTYPES(NAME) "\nops" PLN_OPS(NAME) "\ncodes" PLN_CODES(NAME);
}
#undef NAME

pln_group *pln_open(void *shared, uint64_t slot_bytes, int rank, int size, const int32_t *names, const int64_t *pids,
                    double timeout_s, double stopped_s)
{
    if (size < 1 || size > PLN_MAX_RANKS || rank < 0 || rank >= size || slot_bytes < (uint64_t)size * LINE_BYTES)
        return NULL;
    pln_group *g = aligned_alloc(LINE_BYTES, (sizeof *g + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES);
    if (g == NULL)
        return NULL;
    memset(g, 0, sizeof *g);
    g->rank = rank, g->size = size, g->timeout_s = timeout_s, g->stopped_s = stopped_s, g->owner = getpid();
    g->sees_processes = sees_processes();
    for (int r = 0; r < size; r++) {
        g->names[r] = names[r];
        g->pids[r] = pids[r];
        if (pids[r] > 0)
            pln_read_process(pids[r], &g->starts[r]);
    }
    pln_lay_out(g, shared, slot_bytes);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->has_work, NULL);
    pthread_cond_init(&g->has_result, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return g;
}

/* A process forked from a rank has the rank's group without its threads, and with the lock in an arbitrary state. */
static int is_foreign(const pln_group *g) { return getpid() != g->owner; }

void pln_close(pln_group *g)
{
    if (is_foreign(g))
        return;
    pthread_mutex_lock(&g->lock);
    if (!atomic_load(&g->is_closing))
        pln_leave(g);
    atomic_store(&g->is_closing, 1);
    const int is_mine_to_join = g->has_worker;
    g->has_worker = 0;
    pthread_cond_broadcast(&g->has_work);
    pthread_cond_broadcast(&g->has_result);
    pthread_mutex_unlock(&g->lock);
    if (is_mine_to_join)
        pthread_join(g->worker, NULL);
    pthread_mutex_lock(&g->lock);
    while (g->is_busy) /* on a thread inside `pln_run` */
        pthread_cond_wait(&g->has_result, &g->lock);
    if (!g->has_last_error)
        pln_format_error(g, g->last_error, sizeof g->last_error);
    g->has_last_error = 1;
    pthread_mutex_unlock(&g->lock);
}

void pln_free(pln_group *g)
{
    if (!is_foreign(g)) {
        pln_close(g);
        pthread_cond_destroy(&g->has_work);
        pthread_cond_destroy(&g->has_result);
        pthread_mutex_destroy(&g->lock);
    }
    free(g->queue);
    free(g);
}

void pln_explain(pln_group *g, char *text, size_t bytes)
{
    if (is_foreign(g)) {
        snprintf(text, bytes, "this process was forked from a rank");
        return;
    }
    pthread_mutex_lock(&g->lock);
    if (g->has_last_error)
        snprintf(text, bytes, "%s", g->last_error);
    else
        pln_format_error(g, text, bytes);
    pthread_mutex_unlock(&g->lock);
}

static int replace_arena(pln_group *g, int serial, arena next)
{
    int code = PLN_BAD;
    if (is_foreign(g))
        return PLN_FORKED;
    pthread_mutex_lock(&g->lock);
    for (int a = 0; a < PLN_MAX_ARENAS && code != PLN_OK; a++)
        if (g->arenas[a].serial == serial) {
            g->arenas[a] = next;
            code = PLN_OK;
        }
    pthread_mutex_unlock(&g->lock);
    return code;
}

int pln_add_arena(pln_group *g, int serial, void *base, uint64_t part_bytes)
{
    return replace_arena(g, 0, (arena){serial, base, part_bytes});
}

int pln_remove_arena(pln_group *g, int serial) { return replace_arena(g, serial, (arena){0, NULL, 0}); }

static int check(pln_group *g, int kind, int dtype, int op, int root)
{
    if (is_foreign(g))
        return PLN_FORKED;
    if (kind < 0 || kind >= PLN_NUM_KINDS || dtype < 0 || dtype >= PLN_NUM_DTYPES || op < 0 || op >= PLN_NUM_OPS ||
        root < 0 || root >= g->size)
        return PLN_BAD;
    const int is_sum = kind == PLN_ALL_REDUCE || kind == PLN_REDUCE_SCATTER;
    if (is_sum && (dtype == PLN_U8 || (op == PLN_ROUNDED && dtype != PLN_F32)))
        return PLN_BAD;
    return PLN_OK;
}

/* Lock held: make room for one more operation. */
static int make_room(pln_group *g)
{
    if (g->submitted - g->finished < g->queue_length)
        return PLN_OK;
    const int64_t length = g->queue_length == 0 ? QUEUE_LENGTH : 2 * g->queue_length;
    request *queue = malloc((size_t)length * sizeof *queue);
    if (queue == NULL)
        return PLN_BAD;
    for (int64_t i = g->finished; i < g->submitted; i++)
        queue[i % length] = g->queue[i % g->queue_length];
    free(g->queue);
    g->queue = queue, g->queue_length = length;
    return PLN_OK;
}

/* Lock held: append an operation and return its ticket. */
static int64_t enqueue(pln_group *g, const request *wanted)
{
    if (atomic_load(&g->is_closing))
        return -PLN_CLOSED;
    if (make_room(g) != PLN_OK)
        return -PLN_BAD;
    g->queue[g->submitted % g->queue_length] = *wanted;
    return ++g->submitted;
}

/* Lock held. */
static int status_of(const pln_group *g, int64_t ticket)
{
    return g->first_failed != 0 && ticket >= g->first_failed ? g->failure : PLN_OK;
}

int64_t pln_submit(pln_group *g, int kind, int dtype, int op, int root, const void *in, void *out, uint64_t count,
                   double timeout_s)
{
    const int code = check(g, kind, dtype, op, root);
    if (code != PLN_OK)
        return -code;
    request wanted = {kind, dtype, op, root, count, 0, 0, in, out, timeout_s, 0, 0, 0};
    pthread_mutex_lock(&g->lock);
    int64_t ticket = enqueue(g, &wanted);
    if (ticket > 0 && !g->is_busy && g->finished + 1 == ticket && pln_is_short(g, &wanted) &&
        atomic_load(&g->shared->broken) == 0)
        pln_put_out(g, &g->queue[g->finished % g->queue_length]);
    else if (ticket > 0 && entrust(g) != PLN_OK) {
        g->submitted--;
        ticket = -PLN_BAD;
    }
    pthread_mutex_unlock(&g->lock);
    return ticket;
}

/* Lock held: wait for a ticket. Operations that have not begun run on this thread. */
static int wait_here(pln_group *g, int64_t ticket)
{
    /* A closed group starts no operations, but a running operation still writes to the caller's memory. */
    while (g->finished < ticket && (!atomic_load(&g->is_closing) || (g->is_busy && g->finished + 1 == ticket))) {
        if (g->is_busy)
            pthread_cond_wait(&g->has_result, &g->lock);
        else
            run_next(g, 1);
    }
    return g->finished < ticket ? PLN_CLOSED : status_of(g, ticket);
}

int pln_run(pln_group *g, int kind, int dtype, int op, int root, const void *in, void *out, uint64_t count,
            double timeout_s)
{
    const int bad = check(g, kind, dtype, op, root);
    if (bad != PLN_OK)
        return bad;
    const request wanted = {kind, dtype, op, root, count, 0, 0, in, out, timeout_s, 0, 0, 0};
    pthread_mutex_lock(&g->lock);
    const int64_t ticket = enqueue(g, &wanted);
    const int code = ticket < 0 ? (int)-ticket : wait_here(g, ticket);
    pthread_mutex_unlock(&g->lock);
    return code;
}

/* Lock held: finish a short operation if all ranks have arrived. Returns whether the ticket has finished. */
static int is_finished(pln_group *g, int64_t ticket)
{
    if (g->finished < ticket && !g->is_busy && !atomic_load(&g->is_closing)) {
        const request *next = &g->queue[g->finished % g->queue_length];
        if (next->is_out && (pln_can_finish(g, next) || atomic_load(&g->shared->broken) != 0))
            run_next(g, 1);
    }
    return g->finished >= ticket;
}

int pln_wait(pln_group *g, int64_t ticket, double timeout_s)
{
    if (is_foreign(g))
        return PLN_FORKED;
    pthread_mutex_lock(&g->lock);
    if (timeout_s < 0) {
        const int code = wait_here(g, ticket);
        pthread_mutex_unlock(&g->lock);
        return code;
    }
    const double until = pln_now() + timeout_s;
    const struct timespec deadline = {(time_t)until, (long)((until - (double)(time_t)until) * 1e9)};
    int expired = is_finished(g, ticket) || timeout_s <= 0 || entrust(g) != PLN_OK;
    while (g->finished < ticket && !expired && (!atomic_load(&g->is_closing) || (g->is_busy && g->finished + 1 == ticket)))
        expired = pthread_cond_timedwait(&g->has_result, &g->lock, &deadline) != 0;
    int code = status_of(g, ticket);
    if (g->finished < ticket)
        code = atomic_load(&g->is_closing) ? PLN_CLOSED : PLN_RUNNING;
    pthread_mutex_unlock(&g->lock);
    return code;
}

/* In a closed group everything counts as done, because nothing more will run. Repeated calls detect a lost rank, because
 * the worker waits for it meanwhile. */
int pln_is_done(pln_group *g, int64_t ticket)
{
    if (is_foreign(g))
        return 1;
    pthread_mutex_lock(&g->lock);
    const int done = is_finished(g, ticket) || atomic_load(&g->is_closing) || (g->entrusted < ticket && entrust(g) != PLN_OK);
    pthread_mutex_unlock(&g->lock);
    return done;
}
