/* Collectives between the processes of one host, in shared memory. This code uses neither torch nor Python: the caller
 * maps the memory and numbers the ranks, and every argument is a plain number or address. */
#ifndef PACELINE_NATIVE_H
#define PACELINE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define PLN_VERSION 6 /* interface version, checked by native.py */
#define PLN_MAX_RANKS 256
#define PLN_MAX_ARENAS 64

/* Each table defines an enum and the names in error messages. native.py repeats the numbers; a test compares them with
 * `pln_constants`. */
#define PLN_KINDS(X)                                                                                                   \
    X(ALL_REDUCE, "all-reduce") X(REDUCE_SCATTER, "reduce-scatter") X(ALL_GATHER, "all-gather")                        \
    X(BROADCAST, "broadcast") X(BARRIER, "barrier")
#define PLN_DTYPES(X)                                                                                                  \
    X(F32, "float32") X(F64, "float64") X(BF16, "bfloat16") X(F16, "float16") X(I32, "int32") X(I64, "int64")          \
    X(U8, "bytes")
#define PLN_OPS(X) X(SUM, "sum") X(AVG, "avg") X(MIN, "min") X(MAX, "max") X(ROUNDED, "avg in bfloat16")
/* Return codes: 0, or why the group can no longer be used. The last one means that an operation is still running. */
#define PLN_CODES(X)                                                                                                   \
    X(OK, "ok") X(DEAD, "dead") X(STOPPED, "stopped") X(LEFT, "left") X(TIMEOUT, "timeout") X(MISMATCH, "mismatch")    \
    X(CLOSED, "closed") X(BAD, "bad") X(FORKED, "forked") X(RUNNING, "running")

#define PLN_MEMBER(id, name) PLN_##id,
enum { PLN_KINDS(PLN_MEMBER) PLN_NUM_KINDS };
enum { PLN_DTYPES(PLN_MEMBER) PLN_NUM_DTYPES };
enum { PLN_OPS(PLN_MEMBER) PLN_NUM_OPS };
enum { PLN_CODES(PLN_MEMBER) PLN_NUM_CODES };
#undef PLN_MEMBER

/* The library is compiled with hidden symbols; it exports these. */
#pragma GCC visibility push(default)

typedef struct pln_group pln_group;

int pln_version(void); /* PLN_VERSION of the compiled sources */
const char *pln_constants(void); /* one line per table above: its name and its members */

/* -- kernels.c -- */

/* Reduce `count` elements of `num_src` vectors, in order, and write the result to each of `num_dst` vectors, which may be
 * the sources. AVG divides by `divisor`. ROUNDED (float32 only) gives the average as if ranks sent bfloat16: each number
 * is multiplied by 1 / `divisor` and rounded to bfloat16; the sum is computed in float32 and rounded again. */
void pln_reduce(int dtype, int op, void *const *dst, int num_dst, const void *const *src, int num_src, size_t count,
                int divisor);
size_t pln_element_bytes(int dtype);
const char *pln_cpu(void); /* the kernels chosen for this processor */
int pln_use_cpu(const char *name); /* choose other kernels, for tests; 0 if this processor supports them */

/* Set the calling thread's floating-point mode to the default, and restore it. */
uint64_t pln_plain_mode(void);
void pln_restore_mode(uint64_t mode);

/* -- codecs.c: a bucket is the concatenation of `num` float32 vectors -- */

#define PLN_BLOCK 256 /* numbers per scale; BLOCK in strategy.py */

/* Encode grads + errors in blocks: a scale in float32 and PLN_BLOCK numbers of 8 or 4 bits. Writes the residuals to
 * `lost`. Without error feedback, `errors` and `lost` are NULL. */
void pln_quantize(float *const *grads, float *const *errors, float *const *lost, const uint64_t *counts, int num,
                  int bits, uint64_t num_blocks, uint8_t *out);
/* Average rows of such blocks, and quantize the result. Adds the residual, times the number of rows, to `lost` (or NULL),
 * starting at element `offset`. */
void pln_average_quantized(const uint8_t *rows, int num_rows, int bits, uint64_t num_blocks, uint8_t *out,
                           float *const *lost, const uint64_t *counts, int num, uint64_t offset);
/* Decode to `grads`. Returns whether all numbers are finite. */
int pln_dequantize(const uint8_t *in, int bits, uint64_t num_blocks, float *const *grads, const uint64_t *counts, int num);
void pln_to_bf16(const float *in, float factor, uint64_t count, uint16_t *out);
/* sums = values + errors. Lists the indices of sums with a magnitude of at least `threshold`, NaN included. Returns their
 * number, but lists at most `room` of them. */
uint64_t pln_select(const float *values, const float *errors, float *sums, uint64_t count, float threshold,
                    int32_t *places, uint64_t room);
/* Replace a matrix by the product of `left` (rows x rank) and `right` (rank x columns), and write the difference to
 * `lost` (or NULL). */
void pln_subtract_product(float *matrix, const float *left, const float *right, uint64_t rows, uint64_t columns, int rank,
                          float *lost);

/* -- group.c -- */

/* The bytes that the ranks of a group must share. They must be zero when the first rank opens the group. */
uint64_t pln_segment_bytes(int size, uint64_t slot_bytes);

/* Join as `rank` of `size`. `names` are used in error messages, and `pids` to check that ranks are alive. */
pln_group *pln_open(void *segment, uint64_t slot_bytes, int rank, int size, const int32_t *names, const int64_t *pids,
                    double timeout_s, double stopped_s);
/* Leave the group: ranks that wait for this one fail. Ends the worker and operations on other threads, and returns the
 * memory to the caller. Every later call reports that the group is closed, until `pln_free` frees it. */
void pln_close(pln_group *group);
void pln_free(pln_group *group);

/* Register memory in which each rank has a part of `part_bytes`, in rank order. Vectors in it are reduced in place.
 * `serial`, above 0, identifies it on all ranks. Returns 0, or PLN_BAD if there are too many arenas. */
int pln_add_arena(pln_group *group, int serial, void *base, uint64_t part_bytes);
int pln_remove_arena(pln_group *group, int serial);

/* Start an operation and return its ticket (above 0), or run it to completion. `count` is in elements: of the whole
 * vector or, for reduce-scatter and all-gather, of one rank's part. For a barrier it only has to be equal on all ranks. A
 * `timeout_s` of 0 means the group's own. */
int64_t pln_submit(pln_group *group, int kind, int dtype, int op, int root, const void *in, void *out, uint64_t count,
                   double timeout_s);
int pln_run(pln_group *group, int kind, int dtype, int op, int root, const void *in, void *out, uint64_t count,
            double timeout_s);
/* Wait for a ticket. Returns PLN_RUNNING after `timeout_s` (below 0: no limit). A limit of 0 only finishes an operation
 * for which all ranks have arrived: polling with it does not detect a lost rank. */
int pln_wait(pln_group *group, int64_t ticket, double timeout_s);
int pln_is_done(pln_group *group, int64_t ticket);
/* If another group is broken, break this one for the same reason. */
void pln_break_too(pln_group *group, const pln_group *other);
/* The error message of a failed group. */
void pln_explain(pln_group *group, char *text, size_t bytes);

#pragma GCC visibility pop

#endif
