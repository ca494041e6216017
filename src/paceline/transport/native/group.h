/* Declarations shared by group.c and worker.c. */
#ifndef PACELINE_GROUP_H
#define PACELINE_GROUP_H

#include "paceline_native.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#define LINE_BYTES 128 /* processors fetch 64-byte lines in pairs */
#define QUEUE_LENGTH 64 /* initial length */

/* An operation as this rank requested it. */
typedef struct {
    int32_t kind, dtype, op, root;
    uint64_t count, offset;
    int32_t arena; /* serial number; 0: not in shared memory */
    const void *in;
    void *out;
    double timeout_s, began;
    uint32_t phase; /* after which the other ranks can read this rank's data */
    int32_t is_out; /* the data is staged, so the remaining work is to wait and read */
} request;

/* The part of a request that the others read in the first phase, without addresses, which are invalid there. */
typedef struct {
    int32_t kind, dtype, op, root, arena;
    uint64_t count, offset;
} announcement;

/* One rank's shared state. `progress` counts finished phases and wraps around. Other ranks write only to `sleepers`. */
typedef struct {
    _Alignas(LINE_BYTES) _Atomic uint32_t progress;
    _Atomic uint32_t core; /* on which the rank finished its last phase */
    _Atomic uint32_t sleepers, has_left;
    _Alignas(LINE_BYTES) announcement asked[2];
} seat;

typedef struct {
    _Alignas(LINE_BYTES) _Atomic uint32_t broken; /* 0, or the reason and, from bit 8 on, the rank at fault */
    seat seats[];
} segment;

typedef struct {
    int serial; /* 0: free */
    char *base;
    uint64_t part_bytes;
} arena;

struct pln_group {
    segment *shared;
    char *slots;
    uint64_t slot_bytes;
    int rank, size, sees_processes;
    int32_t names[PLN_MAX_RANKS];
    int64_t pids[PLN_MAX_RANKS];
    uint64_t starts[PLN_MAX_RANKS];
    double timeout_s, stopped_s;
    int has_core; /* each rank has its own core, and may spin */
    arena arenas[PLN_MAX_ARENAS];

    /* State of the running operation, used only by the thread that runs it. */
    uint32_t progress;
    uint64_t stage, num_ops;
    arena where; /* the arena of its vector, if any */
    double began, limit_s;
    int is_watched, has_woken; /* the caller waits; other ranks were asleep at the last signal */
    int num_crowded, num_blind; /* how often another thread wanted this core; how many more waits skip the long spin */
    double last_look, stopped_since[PLN_MAX_RANKS]; /* for the current wait */

    /* The queue. Tickets 1, 2, ... are submitted and finished in order. All from `first_failed` on have failed. */
    pid_t owner;
    pthread_t worker;
    pthread_mutex_t lock;
    pthread_cond_t has_work, has_result;
    request *queue;
    int64_t queue_length;
    int64_t submitted, finished, first_failed;
    int64_t entrusted; /* the worker runs tickets up to this one */
    int failure, is_busy, has_worker;
    _Atomic int is_closing;
    char last_error[512]; /* the error at the time the group was closed */
    int has_last_error;
};

double pln_now(void);
char pln_read_process(int64_t pid, uint64_t *start);
void pln_lay_out(pln_group *g, void *shared, uint64_t slot_bytes);
int pln_break(pln_group *g, int code, int culprit);
void pln_leave(pln_group *g);
int pln_is_short(const pln_group *g, const request *o);
int pln_can_finish(const pln_group *g, const request *o);
void pln_put_out(pln_group *g, request *o);
int pln_execute(pln_group *g, request *o, int is_watched);
void pln_format_error(pln_group *g, char *text, size_t bytes);

#endif
