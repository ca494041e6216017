/* Compressed gradient formats: blocks of small integers with a scale, bfloat16, and indices of large elements.
 *
 * A bucket is several vectors, and a block may begin in one and end in another. The last block is padded with zeros. Every
 * operation is rounded separately and in a fixed order, so that all processors, and torch's operations, agree. */
#include "paceline_native.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LEAST_SCALE 1e-37f /* a smaller scale may have an infinite inverse: such blocks are sent as zeros */
#define ROUNDER 12582912.0f /* 1.5 * 2^23 */

typedef struct {
    float *const *vectors;
    const uint64_t *counts;
    int num;
    uint64_t offset; /* in the first vector */
} pieces;

INLINE int32_t as_bits(float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
INLINE float as_float(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
INLINE size_t block_bytes(int bits) { return 4 + PLN_BLOCK * (size_t)bits / 8; }

/* The next contiguous numbers, at most `most`. Returns how many; 0 at the end. */
INLINE uint64_t take(pieces *from, uint64_t most, float **at)
{
    while (from->num > 0 && from->offset >= *from->counts) {
        from->offset -= *from->counts;
        from->vectors++, from->counts++, from->num--;
    }
    if (from->num == 0)
        return 0;
    const uint64_t left = *from->counts - from->offset, count = left < most ? left : most;
    *at = *from->vectors + from->offset;
    from->offset += count;
    return count;
}
/* Take the next block if it is contiguous, and return its address. Otherwise return `local`. */
INLINE float *find_block(pieces *from, float *local)
{
    if (from->num == 0 || from->offset + PLN_BLOCK > *from->counts)
        return local;
    from->offset += PLN_BLOCK;
    return *from->vectors + from->offset - PLN_BLOCK;
}
INLINE const float *read_block(pieces *from, float *local)
{
    uint64_t done = 0, count;
    float *at = find_block(from, local);
    if (at != local)
        return at;
    while (done < PLN_BLOCK && (count = take(from, PLN_BLOCK - done, &at)) > 0) {
        memcpy(local + done, at, count * sizeof(float));
        done += count;
    }
    memset(local + done, 0, (PLN_BLOCK - done) * sizeof(float));
    return local;
}
INLINE void write_block(pieces *into, const float *local)
{
    uint64_t done = 0, count;
    float *at;
    while (done < PLN_BLOCK && (count = take(into, PLN_BLOCK - done, &at)) > 0) {
        memcpy(at, local + done, count * sizeof(float));
        done += count;
    }
}

typedef struct {
    void (*quantize)(pieces, pieces, pieces, int, uint64_t, uint8_t *);
    void (*average)(const uint8_t *, int, int, uint64_t, uint8_t *, pieces);
    int (*dequantize)(const uint8_t *, int, uint64_t, pieces);
    void (*round)(const float *, float, uint64_t, uint16_t *);
    uint64_t (*select)(const float *, const float *, float *, uint64_t, float, int32_t *, uint64_t);
    void (*subtract)(float *, const float *, const float *, uint64_t, uint64_t, int, float *);
} codec_table;

#define EACH "codecs.inc"
#include "processors.h"

static const codec_table *const codecs[] = PER_PROCESSOR(&codecs);

static const codec_table *chosen(void) { return codecs[pln_processor]; }

static pieces all_of(float *const *vectors, const uint64_t *counts, int num, uint64_t offset)
{
    return (pieces){vectors, counts, vectors == NULL ? 0 : num, offset};
}

void pln_quantize(float *const *grads, float *const *errors, float *const *lost, const uint64_t *counts, int num,
                  int bits, uint64_t num_blocks, uint8_t *out)
{
    const uint64_t mode = pln_plain_mode();
    chosen()->quantize(all_of(grads, counts, num, 0), all_of(errors, counts, num, 0), all_of(lost, counts, num, 0), bits,
                       num_blocks, out);
    pln_restore_mode(mode);
}

void pln_average_quantized(const uint8_t *rows, int num_rows, int bits, uint64_t num_blocks, uint8_t *out,
                           float *const *lost, const uint64_t *counts, int num, uint64_t offset)
{
    const uint64_t mode = pln_plain_mode();
    chosen()->average(rows, num_rows, bits, num_blocks, out, all_of(lost, counts, num, offset));
    pln_restore_mode(mode);
}

int pln_dequantize(const uint8_t *in, int bits, uint64_t num_blocks, float *const *grads, const uint64_t *counts, int num)
{
    const uint64_t mode = pln_plain_mode();
    const int is_finite = chosen()->dequantize(in, bits, num_blocks, all_of(grads, counts, num, 0));
    pln_restore_mode(mode);
    return is_finite;
}

void pln_to_bf16(const float *in, float factor, uint64_t count, uint16_t *out)
{
    const uint64_t mode = pln_plain_mode();
    chosen()->round(in, factor, count, out);
    pln_restore_mode(mode);
}

uint64_t pln_select(const float *values, const float *errors, float *sums, uint64_t count, float threshold,
                    int32_t *places, uint64_t room)
{
    const uint64_t mode = pln_plain_mode();
    const uint64_t found = chosen()->select(values, errors, sums, count, threshold, places, room);
    pln_restore_mode(mode);
    return found;
}

void pln_subtract_product(float *matrix, const float *left, const float *right, uint64_t rows, uint64_t columns, int rank,
                          float *lost)
{
    const uint64_t mode = pln_plain_mode();
    chosen()->subtract(matrix, left, right, rows, columns, rank, lost);
    pln_restore_mode(mode);
}
