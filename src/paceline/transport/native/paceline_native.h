/* Collectives between the processes of one host, in memory that they share. No torch and no Python in here: memory comes
 * mapped, ranks come numbered, and every call says in plain numbers what is to be done. */
#ifndef PACELINE_NATIVE_H
#define PACELINE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define PLN_VERSION 6 /* of this interface; native.py wants the same */
#define PLN_MAX_RANKS 256
#define PLN_MAX_ARENAS 64

/* Each table is an enum here, names in error messages, and numbers in native.py, which a test compares with
 * `pln_constants`. */
#define PLN_KINDS(X)                                                                                                   \
    X(ALL_REDUCE, "all-reduce") X(REDUCE_SCATTER, "reduce-scatter") X(ALL_GATHER, "all-gather")                        \
    X(BROADCAST, "broadcast") X(BARRIER, "barrier")
#define PLN_DTYPES(X)                                                                                                  \
    X(F32, "float32") X(F64, "float64") X(BF16, "bfloat16") X(F16, "float16") X(I32, "int32") X(I64, "int64")          \
    X(U8, "bytes")
#define PLN_OPS(X) X(SUM, "sum") X(AVG, "avg") X(MIN, "min") X(MAX, "max") X(ROUNDED, "avg in bfloat16")
/* What a call returns: 0, or why the group can be used no more; the last says that an operation still runs. */
#define PLN_CODES(X)                                                                                                   \
    X(OK, "ok") X(DEAD, "dead") X(STOPPED, "stopped") X(LEFT, "left") X(TIMEOUT, "timeout") X(MISMATCH, "mismatch")    \
    X(CLOSED, "closed") X(BAD, "bad") X(FORKED, "forked") X(RUNNING, "running")

#define PLN_MEMBER(id, name) PLN_##id,
enum { PLN_KINDS(PLN_MEMBER) PLN_NUM_KINDS };
enum { PLN_DTYPES(PLN_MEMBER) PLN_NUM_DTYPES };
enum { PLN_OPS(PLN_MEMBER) PLN_NUM_OPS };
enum { PLN_CODES(PLN_MEMBER) PLN_NUM_CODES };
#undef PLN_MEMBER

/* The library is compiled with hidden symbols; these are what it exports. */
#pragma GCC visibility push(default)

typedef struct pln_group pln_group;

int pln_version(void); /* PLN_VERSION of the sources that were compiled */
const char *pln_constants(void); /* a line per table above: its name, and its members in order */

/* -- kernels.c -- */

/* Reduce `count` elements of `num_src` vectors, in their order, and write the result to each of `num_dst` vectors, which
 * may be the sources themselves. AVG divides by `divisor`. ROUNDED, of float32 alone, is what ranks get that send bfloat16:
 * each number is multiplied by 1 / `divisor` and rounded to bfloat16, the sum is in float32, and is rounded again. */
void pln_reduce(int dtype, int op, void *const *dst, int num_dst, const void *const *src, int num_src, size_t count,
                int divisor);
size_t pln_element_bytes(int dtype);
const char *pln_cpu(void); /* which kernels this processor got */
int pln_use_cpu(const char *name); /* take others, for tests; 0 if this processor has them */

/* How the caller's thread rounds becomes the default, and is what it was again. */
uint64_t pln_plain_mode(void);
void pln_restore_mode(uint64_t mode);

/* -- codecs.c: a bucket is `num` vectors of float32, one behind the other -- */

#define PLN_BLOCK 256 /* numbers with one scale; BLOCK in strategy.py */

/* grads + errors in blocks: a scale in float32 and PLN_BLOCK numbers of 8 or 4 bits. What is lost is left in `lost`.
 * Without errors, `errors` and `lost` are NULL. */
void pln_quantize(float *const *grads, float *const *errors, float *const *lost, const uint64_t *counts, int num,
                  int bits, uint64_t num_blocks, uint8_t *out);
/* The mean of rows of such blocks, quantised again. What is lost, once for each row, is added to `lost` (or NULL) from
 * the number `offset` on. */
void pln_average_quantized(const uint8_t *rows, int num_rows, int bits, uint64_t num_blocks, uint8_t *out,
                           float *const *lost, const uint64_t *counts, int num, uint64_t offset);
/* Write the numbers to `grads`; whether all are finite. */
int pln_dequantize(const uint8_t *in, int bits, uint64_t num_blocks, float *const *grads, const uint64_t *counts, int num);
void pln_to_bf16(const float *in, float factor, uint64_t count, uint16_t *out);
/* sums = values + errors, and the places of those at least as large as `threshold`, NaN included. Returns how many there
 * are; only `room` of them are listed. */
uint64_t pln_select(const float *values, const float *errors, float *sums, uint64_t count, float threshold,
                    int32_t *places, uint64_t room);
/* A matrix becomes the product of `left` (rows x rank) and `right` (rank x columns), and what it had more goes to `lost` (or
 * NULL). */
void pln_subtract_product(float *matrix, const float *left, const float *right, uint64_t rows, uint64_t columns, int rank,
                          float *lost);

/* -- group.c -- */

/* The bytes that the ranks of a group must share, all zero when the first of them opens it. */
uint64_t pln_segment_bytes(int size, uint64_t slot_bytes);

/* Join as `rank` of `size`. `names` and `pids` say what to call the ranks in errors and how to see that they live. */
pln_group *pln_open(void *segment, uint64_t slot_bytes, int rank, int size, const int32_t *names, const int64_t *pids,
                    double timeout_s, double stopped_s);
/* Leave: ranks that wait for this one fail. Ends the worker and what runs on other threads; the memory is the
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
/* Wait for a ticket; PLN_RUNNING if it takes longer than `timeout_s` (below 0: as long as it takes). A limit of 0 finishes
 * what waits for nobody; whoever asks with it alone does not find out that a rank is lost. */
int pln_wait(pln_group *group, int64_t ticket, double timeout_s);
int pln_is_done(pln_group *group, int64_t ticket);
/* Break a group for the reason for which another one is broken, if it is. */
void pln_break_too(pln_group *group, const pln_group *other);
/* The error message of a group that has failed. */
void pln_explain(pln_group *group, char *text, size_t bytes);

#pragma GCC visibility pop

#endif
