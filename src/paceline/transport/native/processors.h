/* Compiles one source for several kinds of processor. Includes EACH once per kind, with SUFFIX as its name and WIDE as
 * its vector size in bytes. PER_PROCESSOR(name) lists the variants that EACH defines; `pln_processor` is the index of the
 * kind chosen at startup. */
extern int pln_processor; /* kernels.c */

#if defined(__x86_64__)
#include <immintrin.h>
#define PER_PROCESSOR(name) {name##_base, name##_avx2, name##_avx512}
#else
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#define PER_PROCESSOR(name) {name##_base}
#endif

#define SUFFIX base
#define WIDE 16
#include EACH
#undef SUFFIX
#undef WIDE

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define SUFFIX avx2
#define WIDE 32
#include EACH
#undef SUFFIX
#undef WIDE
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define SUFFIX avx512
#define WIDE 64
#include EACH
#undef SUFFIX
#undef WIDE
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
