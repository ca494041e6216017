/* Reductions of vectors in rank order, compiled for several kinds of processor. The kind is chosen at run time. */
#include "paceline_native.h"

#include <string.h>

typedef void (*reducer)(void *const *dst, int num_dst, const void *const *src, int num_src, size_t bytes, int divisor);

/* AVG by a power of two has its own functions, which follow those of the operations. */
#define SCALED PLN_NUM_OPS
#define NUM_TABLED (PLN_NUM_OPS + 1)

#define INLINE static inline __attribute__((always_inline))
#define EACH "kernels.inc"
#include "processors.h"

static const reducer (*const tables[])[NUM_TABLED] = PER_PROCESSOR(table);
int pln_processor;

#if defined(__aarch64__)
#define BASE_NAME "neon"
#elif defined(__x86_64__)
#define BASE_NAME "sse2"
#else
#define BASE_NAME "portable"
#endif
static const char *const names[] = {BASE_NAME, "avx2", "avx512"};

static int is_supported(int processor)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (processor == 1)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (processor == 2)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return processor == 0;
}

int pln_use_cpu(const char *name)
{
    for (int processor = 0; processor < 3; processor++)
        if (strcmp(name, names[processor]) == 0 && is_supported(processor)) {
            pln_processor = processor;
            return 0;
        }
    return -1;
}

__attribute__((constructor)) static void choose(void)
{
    if (pln_use_cpu("avx512") != 0)
        pln_use_cpu("avx2");
}

const char *pln_cpu(void) { return names[pln_processor]; }

/* The caller's thread may use any rounding mode, or flush subnormal numbers, but all ranks must compute the same result. */
#if defined(__x86_64__)
#define PLAIN_MODE 0x1f80
static uint64_t read_mode(void) { return _mm_getcsr() & 0xffc0; } /* the other bits are flags */
static void write_mode(uint64_t mode) { _mm_setcsr((unsigned)mode); }
#else
#define PLAIN_MODE 0
#if defined(__aarch64__)
static uint64_t read_mode(void)
{
    uint64_t mode;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void write_mode(uint64_t mode) { __asm__ __volatile__("msr fpcr, %0" : : "r"(mode)); }
#else
static uint64_t read_mode(void) { return PLAIN_MODE; }
static void write_mode(uint64_t mode) { (void)mode; }
#endif
#endif

size_t pln_element_bytes(int dtype)
{
    static const size_t bytes[PLN_NUM_DTYPES] = {4, 8, 2, 2, 4, 8, 1};
    return bytes[dtype];
}

uint64_t pln_plain_mode(void)
{
    const uint64_t mode = read_mode();
    if (mode != PLAIN_MODE)
        write_mode(PLAIN_MODE);
    return mode;
}

void pln_restore_mode(uint64_t mode)
{
    if (mode != PLAIN_MODE)
        write_mode(mode);
}

void pln_reduce(int dtype, int op, void *const *dst, int num_dst, const void *const *src, int num_src, size_t count,
                int divisor)
{
    const int how = op == PLN_AVG && (divisor & (divisor - 1)) == 0 ? SCALED : op;
    const uint64_t mode = pln_plain_mode();
    tables[pln_processor][dtype][how](dst, num_dst, src, num_src, count * pln_element_bytes(dtype), divisor);
    pln_restore_mode(mode);
}
