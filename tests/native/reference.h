/* The reference of the fuzz program: random numbers and reductions one number at a time in plain C, without any of the
 * transport's arithmetic. */
#ifndef PACELINE_REFERENCE_H
#define PACELINE_REFERENCE_H

#include "paceline_native.h"

#include <math.h>
#include <string.h>

/* splitmix64 */
static inline uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline uint64_t below(uint64_t *state, uint64_t bound) { return next(state) % bound; }

typedef struct {
    double real;
    uint64_t whole;
} number;

static inline int is_real(int dtype) { return dtype <= PLN_F16; }

/* Convert to a 16-bit type with `places` fraction bits and the smallest normal exponent `lowest`, rounding ties to
 * even. */
static inline uint16_t to_half(float value, int places, int lowest, int highest)
{
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const uint16_t infinity = (uint16_t)((highest - lowest + 2) << places);
    if (isnan(value))
        return sign | infinity | (uint16_t)(1 << (places - 1));
    if (isinf(value))
        return sign | infinity;
    double size = fabs((double)value);
    if (size == 0)
        return sign;
    int exponent;
    frexp(size, &exponent);
    exponent = exponent - 1 < lowest ? lowest : exponent - 1;
    const double steps = nearbyint(ldexp(size, places - exponent)); /* may round up to the next exponent */
    const uint64_t code = ((uint64_t)(exponent - lowest) << places) + (uint64_t)steps;
    return code >= infinity ? sign | infinity : (uint16_t)(sign | code);
}

static inline float from_half(uint16_t code, int places, int lowest)
{
    const int top = 15 - places, exponent = code >> places & ((1 << top) - 1), rest = code & ((1 << places) - 1);
    const double sign = code & 0x8000 ? -1 : 1;
    if (exponent == (1 << top) - 1)
        return rest ? NAN : (float)(sign * INFINITY);
    if (exponent == 0)
        return (float)(sign * ldexp(rest, lowest - places));
    return (float)(sign * ldexp(rest + (1 << places), lowest + exponent - 1 - places));
}

static inline uint16_t to_16(int dtype, float value)
{
    return dtype == PLN_BF16 ? to_half(value, 7, -126, 127) : to_half(value, 10, -14, 15);
}

/* Element `i` of a rank's vector. Most have similar magnitudes, to make sums round; some are special values. */
static inline number number_of(int dtype, uint64_t salt, int rank, uint64_t i)
{
    uint64_t state = salt + (uint64_t)rank * 0x10001 + i * 0x9e3779b1u, bits = next(&state);
    number n = {0, bits};
    if (!is_real(dtype))
        return n;
    if (dtype == PLN_BF16 || dtype == PLN_F16) /* seven bits and a few powers of two: exact in both types */
        n.real = (double)((int)(bits >> 32 & 0xff) - 128) * (bits >> 40 & 1 ? 64 : 0.125);
    else
        n.real = (double)(int32_t)(bits >> 32) / 65536.0;
    if (dtype == PLN_F32)
        n.real = (double)(float)n.real;
    switch (bits % 61) {
    case 0: n.real = INFINITY; break;
    case 1: n.real = -INFINITY; break;
    case 2: n.real = NAN; break;
    case 3: n.real = 0.0; break;
    case 4: n.real = -0.0; break;
    case 5: n.real *= 1e-9; break; /* subnormal in float16 */
    case 6: n.real *= 1e-43; break; /* subnormal in float32 and bfloat16 */
    case 7: n.real *= dtype == PLN_F16 ? 7 : 1e34; break; /* sums overflow */
    default: return n;
    }
    /* Round to the type, to make all copies equal. */
    if (dtype == PLN_BF16)
        n.real = from_half(to_16(dtype, (float)n.real), 7, -126);
    else if (dtype == PLN_F16)
        n.real = from_half(to_16(dtype, (float)n.real), 10, -14);
    else if (dtype == PLN_F32)
        n.real = (double)(float)n.real;
    return n;
}

static inline void put_number(int dtype, char *at, number n)
{
    const float small = (float)n.real;
    const uint16_t half = is_real(dtype) ? to_16(dtype, small) : 0;
    const uint32_t word = (uint32_t)n.whole;
    switch (dtype) {
    case PLN_F32: memcpy(at, &small, 4); break;
    case PLN_F64: memcpy(at, &n.real, 8); break;
    case PLN_BF16:
    case PLN_F16: memcpy(at, &half, 2); break;
    case PLN_I32: memcpy(at, &word, 4); break;
    case PLN_I64: memcpy(at, &n.whole, 8); break;
    default: *at = (char)n.whole; break;
    }
}

static inline double pick(int op, double a, double b)
{
    if (isnan(a) || isnan(b))
        return NAN;
    return (op == PLN_MIN ? a < b : a > b) ? a : b;
}

static inline double round_real(double value) { return from_half(to_16(PLN_BF16, (float)value), 7, -126); }

static inline number share_of_number(int dtype, int op, uint64_t salt, int rank, int size, uint64_t i)
{
    number n = number_of(dtype, salt, rank, i);
    if (op == PLN_ROUNDED)
        n.real = round_real((float)n.real * (1 / (float)size));
    return n;
}

/* Reduce element `i` of all ranks' vectors, in rank order; two-byte types and float32 in float32. */
static inline void reduce_numbers(int dtype, int op, uint64_t salt, int size, uint64_t i, char *at)
{
    const int picks = op == PLN_MIN || op == PLN_MAX;
    number sum = share_of_number(dtype, op, salt, 0, size, i);
    for (int r = 1; r < size; r++) {
        const number other = share_of_number(dtype, op, salt, r, size, i);
        if (is_real(dtype)) {
            sum.real = picks ? pick(op, sum.real, other.real) : sum.real + other.real;
            if (dtype != PLN_F64)
                sum.real = (double)(float)sum.real; /* double rounding is harmless: 53 bits exceed 2 x 24 + 1 */
        } else if (picks) {
            const int64_t a = dtype == PLN_I32 ? (int32_t)sum.whole : (int64_t)sum.whole;
            const int64_t b = dtype == PLN_I32 ? (int32_t)other.whole : (int64_t)other.whole;
            sum.whole = (uint64_t)((op == PLN_MIN ? a < b : a > b) ? a : b);
        } else {
            sum.whole += other.whole;
        }
    }
    if (op == PLN_AVG) {
        sum.real = dtype == PLN_F64 ? sum.real / size : (double)((float)sum.real / (float)size);
        sum.whole = dtype == PLN_I32 ? (uint64_t)(int64_t)((int32_t)sum.whole / size)
                                     : (uint64_t)((int64_t)sum.whole / size);
    }
    if (op == PLN_ROUNDED)
        sum.real = round_real(sum.real);
    put_number(dtype, at, sum);
}

/* Compare bit by bit, but treat all NaNs as equal. */
static inline int is_same_number(int dtype, const char *a, const char *b)
{
    float single[2];
    double both[2];
    uint16_t half[2];
    switch (dtype) {
    case PLN_F32:
        memcpy(&single[0], a, 4), memcpy(&single[1], b, 4);
        return memcmp(a, b, 4) == 0 || (isnan(single[0]) && isnan(single[1]));
    case PLN_F64:
        memcpy(&both[0], a, 8), memcpy(&both[1], b, 8);
        return memcmp(a, b, 8) == 0 || (isnan(both[0]) && isnan(both[1]));
    case PLN_BF16:
    case PLN_F16:
        memcpy(&half[0], a, 2), memcpy(&half[1], b, 2);
        const uint16_t infinity = dtype == PLN_BF16 ? 0x7f80 : 0x7c00;
        return half[0] == half[1] || ((half[0] & 0x7fff) > infinity && (half[1] & 0x7fff) > infinity);
    default:
        return memcmp(a, b, pln_element_bytes(dtype)) == 0;
    }
}

#endif
