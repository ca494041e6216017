/* Collectives between the processes of one host, in memory that they share. No torch and no Python in here: memory comes
 * mapped, ranks come numbered, and every call says in plain numbers what is to be done. */
#ifndef PACELINE_NATIVE_H
#define PACELINE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define PLN_VERSION 3 /* of this interface; native.py wants the same */
#define PLN_MAX_RANKS 256
#define PLN_MAX_ARENAS 64

enum { PLN_ALL_REDUCE, PLN_REDUCE_SCATTER, PLN_ALL_GATHER, PLN_BROADCAST, PLN_BARRIER, PLN_NUM_KINDS };
enum { PLN_F32, PLN_F64, PLN_BF16, PLN_F16, PLN_I32, PLN_I64, PLN_U8, PLN_NUM_DTYPES };
enum { PLN_SUM, PLN_AVG, PLN_MIN, PLN_MAX, PLN_NUM_OPS };

/* What a call returns: 0, or why the group can be used no more; the last says that an operation still runs. */
enum { PLN_OK, PLN_DEAD, PLN_STOPPED, PLN_LEFT, PLN_TIMEOUT, PLN_MISMATCH, PLN_CLOSED, PLN_BAD, PLN_FORKED, PLN_RUNNING };

typedef struct pln_group pln_group;

int pln_version(void); /* PLN_VERSION of the sources that were compiled */

/* -- kernels.c -- */

/* Reduce `count` elements of `num_src` vectors, in their order, and write the result to each of `num_dst` vectors, which
 * may be the sources themselves. AVG divides by `divisor`. */
void pln_reduce(int dtype, int op, void *const *dst, int num_dst, const void *const *src, int num_src, size_t count,
                int divisor);
size_t pln_element_bytes(int dtype);
const char *pln_cpu(void); /* which kernels this processor got */
int pln_use_cpu(const char *name); /* take others, for tests; 0 if this processor has them */

/* -- group.c -- */

/* The bytes that the ranks of a group must share, all zero when the first of them opens it. */
uint64_t pln_segment_bytes(int size, uint64_t slot_bytes);

/* Join as `rank` of `size`. `names` and `pids` say what to call the ranks in errors and how to see that they live. */
pln_group *pln_open(void *segment, uint64_t slot_bytes, int rank, int size, const int32_t *names, const int64_t *pids,
                    double timeout_s, double stopped_s);
/* Leave: who still waits for this rank is told so. Ends the worker and what runs on other threads; the memory is the
 * caller's again. Every later call says that the group is closed, until `pln_free`, after which there is no group. */
void pln_close(pln_group *group);
void pln_free(pln_group *group);

/* Memory in which all ranks have a part of `part_bytes`, one after the other: vectors in it are reduced where they lie.
 * `serial`, above 0, is what all ranks call it. Returns 0, or PLN_BAD if there are too many. */
int pln_add_arena(pln_group *group, int serial, void *base, uint64_t part_bytes);
int pln_remove_arena(pln_group *group, int serial);

/* Start an operation and return its ticket (above 0), or run it to its end. Counts are elements: of the whole vector, or
 * for reduce-scatter and all-gather of one rank's part; a barrier's need only be the same on all ranks. `timeout_s` of 0
 * is the group's. */
int64_t pln_submit(pln_group *group, int kind, int dtype, int op, int root, const void *in, void *out, uint64_t count,
                   double timeout_s);
int pln_run(pln_group *group, int kind, int dtype, int op, int root, const void *in, void *out, uint64_t count,
            double timeout_s);
/* Wait for a ticket; PLN_RUNNING if it takes longer than `timeout_s` (below 0: as long as it takes). */
int pln_wait(pln_group *group, int64_t ticket, double timeout_s);
int pln_is_done(pln_group *group, int64_t ticket);
/* Break a group for the reason for which another one is broken, if it is. */
void pln_break_too(pln_group *group, const pln_group *other);
/* What went wrong, in words. */
void pln_explain(pln_group *group, char *text, size_t bytes);

#endif
