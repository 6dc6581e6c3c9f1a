/* The inner loops of edgetrain's codecs: plain C, no Python, no allocation, no global state but the
 * instruction set in use. `fallback.py` does the same in NumPy, bit for bit; docs/reference/codecs.md says
 * what the bytes mean. What must hold here:
 *
 * - Every result is the same on every machine and in NumPy: sums run in sixteen lanes that are
 *   folded 8-4-2-1, a product is rounded before it is added (-ffp-contract=off, never -ffast-math),
 *   and what can be integers is integers.
 * - A decoder is handed the payload's length, reads nothing outside it, writes nothing outside the
 *   arrays it was promised, and answers a malformed payload with a negative number (enum bad).
 * - Bodies are written once and compiled for each instruction set; `kernels_use` picks. Only
 *   where a compiler cannot find the instruction (compress, movemask) do intrinsics appear.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define X86 1
#include <immintrin.h>
#elif defined(__aarch64__)
#define NEON 1
#include <arm_neon.h>
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire is little-endian, and so must be the machine that runs these kernels"
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

enum bad { /* the order is known to native.py */
    BAD_TRUNCATED = -1,
    BAD_VARINT = -2,
    BAD_COUNT = -3,
    BAD_PARAMETER = -4,
    BAD_QUOTIENT = -5,
    BAD_INDEX = -6,
    BAD_PADDING = -7,
    BAD_MAGNITUDE = -8,
    BAD_TRAILING = -9,
    BAD_CODE = -10,
    BAD_TABLE = -11,
};

#define ABS_BITS 0x7fffffffu
#define SIGN_BIT 0x80000000u
#define LIMIT_BITS 0x71800000u /* 2^100: beyond it nothing but dense codecs carries */
#define TINY_BITS 0x0d800000u  /* 2^-100: a block whose values are all below it is sent as zeros */

#define GAP_BLOCK 32   /* gaps that share one Rice parameter */
#define ESCAPE 24      /* a quotient of 24 says: the gap follows in full */
#define MAX_RICE 30
#define LEVEL_BLOCK 128 /* kept values that share one mean excess */
#define CHUNK 64        /* neighbours that are sampled together: lone cache lines cost four times more */

INLINE u32 bits_of(float x) { u32 b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(u32 b) { float x; memcpy(&x, &b, 4); return x; }
INLINE float load_float(const u8 *p) { float x; memcpy(&x, p, 4); return x; }
INLINE u32 hash32(u32 x) { /* Wellons' lowbias32 */
    x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
    return x;
}
INLINE int bit_length(u32 x) { return x ? 32 - __builtin_clz(x) : 0; }

/* ---- which instruction set ------------------------------------------------------------------ */

static int tier = 0; /* 0 portable, 1 AVX2 or NEON, 2 AVX-512 */

#ifdef X86
#define AVX2 __attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt")))
#define AVX512 __attribute__((target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,bmi,bmi2,lzcnt,popcnt")))
static u64 compress8[256]; /* mask of 8 lanes -> the lanes to keep, one byte each */
static int slow_pdep;      /* Zen 1 and 2 take a hundred cycles for it */
#endif

int kernels_best(void)
{
#ifdef X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512cd"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2"))
        return 1;
    return 0;
#elif defined(NEON)
    return 1;
#else
    return 0;
#endif
}

int kernels_has_neon(void)
{
#ifdef NEON
    return 1;
#else
    return 0;
#endif
}

int kernels_use(int wanted)
{
    int best = kernels_best();
    tier = wanted < best ? wanted : best;
#ifdef X86
    slow_pdep = __builtin_cpu_is("znver1") || __builtin_cpu_is("znver2");
    for (int mask = 0; mask < 256; mask++) {
        u64 lanes = 0;
        for (int lane = 7; lane >= 0; lane--)
            if (mask >> lane & 1) lanes = lanes << 8 | (u64)lane;
        compress8[mask] = lanes;
    }
#endif
    return tier;
}

/* A function `name` that runs name_body as compiled for the instruction set in use. What streams
 * through memory is no faster with 512-bit vectors (a load that straddles two lines costs more), so
 * AVX-512 has code of its own only where it has instructions that AVX2 lacks. */
#ifdef X86
#define VARIANTS(name, params, args) \
    static i64 name##_portable params { return name##_body args; } \
    AVX2 static i64 name##_avx2 params { return name##_body args; } \
    i64 name params { return tier ? name##_avx2 args : name##_portable args; }
#else
#define VARIANTS(name, params, args) \
    i64 name params { return name##_body args; }
#endif

/* VARIANTS of a body whose last argument is one of the functions of a family for m floats. */
#ifdef X86
#define FAMILY_VARIANTS(name, family, params, ...) \
    static i64 name##_portable params { return name##_body(__VA_ARGS__, family); } \
    AVX2 static i64 name##_avx2 params { return name##_body(__VA_ARGS__, family##_avx2); } \
    i64 name params { return tier ? name##_avx2(__VA_ARGS__) : name##_portable(__VA_ARGS__); }
#elif defined(NEON)
#define FAMILY_VARIANTS(name, family, params, ...) \
    i64 name params { return name##_body(__VA_ARGS__, tier ? family##_neon : family); }
#else
#define FAMILY_VARIANTS(name, family, params, ...) \
    i64 name params { return name##_body(__VA_ARGS__, family); }
#endif

/* ---- the yardstick: r += g, twelve bytes an element ------------------------------------------ */

INLINE i64 stream_add_body(float *restrict r, const float *restrict g, i64 n)
{
    for (i64 i = 0; i < n; i++) r[i] += g[i];
    return 0;
}
VARIANTS(stream_add, (float *restrict r, const float *restrict g, i64 n), (r, g, n))

/* ---- momentum: u = m * u + scale * g ---------------------------------------------------------- */

INLINE i64 momentum_body(float *restrict u, const float *restrict g, i64 n, float m, float scale)
{
    for (i64 i = 0; i < n; i++) u[i] = m * u[i] + scale * g[i];
    return 0;
}
VARIANTS(momentum, (float *restrict u, const float *restrict g, i64 n, float m, float scale),
         (u, g, n, m, scale))

/* ---- selection --------------------------------------------------------------------------------
 * r += g (where g is given), then every element whose magnitude's bits are at least `bound`
 * goes to idx/val in order, and is zeroed in r where `zero` says so. idx and val have room for
 * n + 16. Comparing bits instead of floats orders NaN above all, so it cannot hide.
 *
 * Memory binds it: with AVX2 it takes three instructions an element, and mispredicts one branch in a
 * thousand elements or fewer (cachegrind). Of a whole encoding it is 4/5 at 0.1 %, 2/3 at 1 % and 1/3
 * at 10 % (perf, AVX-512), where Rice code takes another third.
 */

INLINE i64 select_tail(float *restrict r, const float *restrict g, i64 i, i64 n, u32 bound,
                       u32 *restrict idx, float *restrict val, i64 count, int add, int zero)
{
    for (; i < n; i++) {
        float x = add ? r[i] + g[i] : r[i];
        int keep = (bits_of(x) & ABS_BITS) >= bound;
        if (keep) { idx[count] = (u32)i; val[count] = x; count++; }
        if (add || zero) r[i] = keep && zero ? 0.0f : x;
    }
    return count;
}

INLINE i64 select_portable(float *restrict r, const float *restrict g, i64 n, u32 bound,
                           u32 *restrict idx, float *restrict val, int add, int zero)
{
    enum { WIDTH = 32 };
    i64 count = 0, i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        float x[WIDTH];
        u32 top = 0;
        for (int j = 0; j < WIDTH; j++) x[j] = add ? r[i + j] + g[i + j] : r[i + j];
        for (int j = 0; j < WIDTH; j++) {
            u32 b = bits_of(x[j]) & ABS_BITS;
            top = b > top ? b : top;
        }
        if (add) for (int j = 0; j < WIDTH; j++) r[i + j] = x[j];
        if (top >= bound) {
            for (int j = 0; j < WIDTH; j++) {
                int keep = (bits_of(x[j]) & ABS_BITS) >= bound;
                idx[count] = (u32)(i + j);
                val[count] = x[j];
                count += keep;
                if (zero && keep) r[i + j] = 0.0f;
            }
        }
    }
    return select_tail(r, g, i, n, bound, idx, val, count, add, zero);
}

#ifdef X86
/* A strip of a multiple of 16 elements, the first at position `first`. What is kept is compressed and
 * stored without asking whether there is any, since a wrong guess costs more than a store; only
 * as much is stored as is usually needed. `rare` says that hits are too few even for that. */
AVX2 INLINE i64 strip_avx2(float *restrict r, const float *restrict g, i64 n, i64 first, u32 bound,
                           u32 *restrict idx, float *restrict val, int add, int zero, int rare)
{
    const __m256i below = _mm256_set1_epi32((int)(bound - 1)); /* both below 2^31: signed is fine */
    const __m256i magnitude = _mm256_set1_epi32((int)ABS_BITS), step = _mm256_set1_epi32(8);
    __m256i here = _mm256_add_epi32(_mm256_set1_epi32((int)first),
                                    _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    i64 count = 0;
    for (i64 i = 0; i < n; i += 16) {
        __m256 x[2];
        __m256i keep[2];
        for (int j = 0; j < 2; j++) {
            x[j] = _mm256_loadu_ps(r + i + 8 * j);
            if (add) x[j] = _mm256_add_ps(x[j], _mm256_loadu_ps(g + i + 8 * j));
            keep[j] = _mm256_cmpgt_epi32(
                _mm256_and_si256(_mm256_castps_si256(x[j]), magnitude), below);
            if (add || zero)
                _mm256_storeu_ps(
                    r + i + 8 * j,
                    zero ? _mm256_andnot_ps(_mm256_castsi256_ps(keep[j]), x[j]) : x[j]);
        }
        __m256i any = _mm256_or_si256(keep[0], keep[1]);
        if (rare && _mm256_testz_si256(any, any)) {
            here = _mm256_add_epi32(here, _mm256_add_epi32(step, step));
            continue;
        }
        for (int j = 0; j < 2; j++) {
            int mask = _mm256_movemask_ps(_mm256_castsi256_ps(keep[j]));
            int found = __builtin_popcount((unsigned)mask);
            __m256i order =
                _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(compress8 + mask)));
            __m256i kept_idx = _mm256_permutevar8x32_epi32(here, order);
            __m256 kept_val = _mm256_permutevar8x32_ps(x[j], order);
            _mm_storeu_si128((__m128i *)(idx + count), _mm256_castsi256_si128(kept_idx));
            _mm_storeu_ps(val + count, _mm256_castps256_ps128(kept_val));
            if (__builtin_expect(found > 4, 0)) {
                _mm256_storeu_si256((__m256i *)(idx + count), kept_idx);
                _mm256_storeu_ps(val + count, kept_val);
            }
            count += found;
            here = _mm256_add_epi32(here, step);
        }
    }
    return count;
}

AVX512 INLINE i64 strip_avx512(float *restrict r, const float *restrict g, i64 n, i64 first,
                               u32 bound, u32 *restrict idx, float *restrict val, int add, int zero,
                               int rare)
{
    const __m512i least = _mm512_set1_epi32((int)bound), step = _mm512_set1_epi32(16);
    const __m512i magnitude = _mm512_set1_epi32((int)ABS_BITS);
    __m512i here = _mm512_add_epi32(
        _mm512_set1_epi32((int)first),
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    i64 count = 0;
    for (i64 i = 0; i < n; i += 16) {
        __m512 x = _mm512_loadu_ps(r + i);
        if (add) x = _mm512_add_ps(x, _mm512_loadu_ps(g + i));
        __mmask16 keep = _mm512_cmpge_epu32_mask(
            _mm512_and_si512(_mm512_castps_si512(x), magnitude), least);
        if (add || zero)
            _mm512_storeu_ps(r + i, zero ? _mm512_mask_mov_ps(x, keep, _mm512_setzero_ps()) : x);
        /* compressed in a register: straight to memory is microcoded on Zen 4 */
        __m512i kept_idx = _mm512_maskz_compress_epi32(keep, here);
        __m512 kept_val = _mm512_maskz_compress_ps(keep, x);
        int found = __builtin_popcount(keep);
        if (rare) {
            _mm_storeu_si128((__m128i *)(idx + count), _mm512_castsi512_si128(kept_idx));
            _mm_storeu_ps(val + count, _mm512_castps512_ps128(kept_val));
        } else {
            _mm256_storeu_si256((__m256i *)(idx + count), _mm512_castsi512_si256(kept_idx));
            _mm256_storeu_ps(val + count, _mm512_castps512_ps256(kept_val));
        }
        if (__builtin_expect(found > (rare ? 4 : 8), 0)) {
            _mm512_storeu_si512(idx + count, kept_idx);
            _mm512_storeu_ps(val + count, kept_val);
        }
        count += found;
        here = _mm512_add_epi32(here, step);
    }
    return count;
}

/* Strips, each taken in the way that suits the density of the one before. */
#define SELECT_STRIPS(strip, one_in, rare_strip, rare_one_in) \
    enum { STRIP = 8192 }; \
    i64 i = (64 - ((uintptr_t)r & 63)) % 64 / 4; /* to where r is aligned: whole lines from there */ \
    i64 count = select_tail(r, g, 0, i < n ? i : n, bound, idx, val, 0, add, zero), found = 0; \
    while (i + 16 <= n) { \
        i64 m = (n - i < STRIP ? n - i : STRIP) & ~15ll; \
        const float *gi = add ? g + i : NULL; \
        if (rare_one_in * found < STRIP) \
            found = rare_strip(r + i, gi, m, i, bound, idx + count, val + count, add, zero, 1); \
        else if (one_in * found < STRIP) \
            found = strip(r + i, gi, m, i, bound, idx + count, val + count, add, zero, 1); \
        else \
            found = strip(r + i, gi, m, i, bound, idx + count, val + count, add, zero, 0); \
        count += found; \
        i += m; \
    } \
    return select_tail(r, g, i, n, bound, idx, val, count, add, zero);

AVX2 INLINE i64 select_avx2(float *restrict r, const float *restrict g, i64 n, u32 bound,
                            u32 *restrict idx, float *restrict val, int add, int zero)
{
    SELECT_STRIPS(strip_avx2, 128, strip_avx2, 128)
}

AVX512 INLINE i64 select_avx512(float *restrict r, const float *restrict g, i64 n, u32 bound,
                                u32 *restrict idx, float *restrict val, int add, int zero)
{
    SELECT_STRIPS(strip_avx512, 16, strip_avx2, 256)
}
#endif

#ifdef NEON
/* Of 64 elements first the largest: two instructions for four of them, where loads, sum and store take
 * 2.5. Only a strip that has some is looked through. */
INLINE i64 select_neon(float *restrict r, const float *restrict g, i64 n, u32 bound,
                       u32 *restrict idx, float *restrict val, int add, int zero)
{
    const uint32x4_t least = vdupq_n_u32(bound);
    i64 count = 0, i = 0;
    for (; i + 64 <= n; i += 64) {
        uint32x4_t top[2] = {vdupq_n_u32(0), vdupq_n_u32(0)};
        for (int j = 0; j < 64; j += 4) {
            float32x4_t x = vld1q_f32(r + i + j);
            if (add) vst1q_f32(r + i + j, x = vaddq_f32(x, vld1q_f32(g + i + j)));
            top[j / 4 & 1] = vmaxq_u32(top[j / 4 & 1], vreinterpretq_u32_f32(vabsq_f32(x)));
        }
        if (vmaxvq_u32(vmaxq_u32(top[0], top[1])) < bound) continue;
        for (i64 from = i; from < i + 64; from += 16) {
            uint32x4_t keep[4];
            for (int j = 0; j < 4; j++) {
                float32x4_t x = vabsq_f32(vld1q_f32(r + from + 4 * j));
                keep[j] = vcgeq_u32(vreinterpretq_u32_f32(x), least);
            }
            /* sixteen lanes to a 64-bit mask of nibbles */
            uint8x16_t lanes = vcombine_u8(
                vmovn_u16(vcombine_u16(vmovn_u32(keep[0]), vmovn_u32(keep[1]))),
                vmovn_u16(vcombine_u16(vmovn_u32(keep[2]), vmovn_u32(keep[3]))));
            u64 mask = vget_lane_u64(
                vreinterpret_u64_u8(vshrn_n_u16(vreinterpretq_u16_u8(lanes), 4)), 0);
            for (mask &= 0x1111111111111111ull; mask; mask &= mask - 1) {
                i64 j = from + (__builtin_ctzll(mask) >> 2);
                idx[count] = (u32)j;
                val[count] = r[j];
                count++;
                if (zero) r[j] = 0.0f;
            }
        }
    }
    return select_tail(r, g, i, n, bound, idx, val, count, add, zero);
}
#endif

/* One call per (add, zero), so that each loop is compiled without the questions. */
#define SELECT(set) \
    i64 select_##set##_(float *restrict r, const float *restrict g, i64 n, u32 bound, \
                        u32 *restrict idx, float *restrict val, int zero) \
    { \
        if (g) return zero ? select_##set(r, g, n, bound, idx, val, 1, 1) \
                           : select_##set(r, g, n, bound, idx, val, 1, 0); \
        return zero ? select_##set(r, g, n, bound, idx, val, 0, 1) \
                    : select_##set(r, g, n, bound, idx, val, 0, 0); \
    }
static SELECT(portable)
#ifdef X86
AVX2 static SELECT(avx2)
AVX512 static SELECT(avx512)
#endif
#ifdef NEON
static SELECT(neon)
#endif

static i64 select_all(float *restrict r, const float *restrict g, i64 n, u32 bound,
                      u32 *restrict idx, float *restrict val, int zero)
{
#ifdef X86
    if (tier == 2) return select_avx512_(r, g, n, bound, idx, val, zero);
    if (tier == 1) return select_avx2_(r, g, n, bound, idx, val, zero);
#elif defined(NEON)
    if (tier >= 1) return select_neon_(r, g, n, bound, idx, val, zero);
#endif
    return select_portable_(r, g, n, bound, idx, val, zero);
}

/* The same, for as long as idx and val, which have room for `room` entries, can take what may come;
 * `stopped` gets the first element that was not looked at. Room for n + 16 is always enough. */
i64 select_large(float *r, const float *g, i64 n, u32 bound, u32 *idx, float *val, i64 room, int zero,
                 i64 *stopped)
{
    enum { PIECE = 1 << 16 };
    i64 count = 0, at = 0;
    while (at < n) {
        i64 m = room >= n + 16 ? n : n - at < PIECE ? n - at : PIECE;
        if (count + m + 16 > room) break;
        i64 found = select_all(r + at, g ? g + at : NULL, m, bound, idx + count, val + count, zero);
        if (at) for (i64 i = count; i < count + found; i++) idx[i] += (u32)at;
        count += found;
        at += m;
    }
    *stopped = at;
    return count;
}

/* ---- the threshold ----------------------------------------------------------------------------
 * The rank-th largest magnitude of a sample: of every `stride` chunks of 64 one, drawn by hash. Rank
 * is at most the size of the sample, for which `scratch` has room (and for 64 more); `hits` gets the
 * number of sampled magnitudes that are at least the answer (above rank only where values tie).
 */

/* The rank-th largest (from 1) of n magnitudes, by radix from the top: 11, 10, 10 bits. What falls
 * into the bin that holds it is moved to the front, so that later passes are short. */
static u32 ranked(u32 *restrict a, i64 n, i64 rank, i64 *at_least)
{
    static const int shift[3] = {20, 10, 0}, width[3] = {11, 10, 10};
    u32 found = 0, counts[4][2048];
    i64 above = 0;
    for (int pass = 0; pass < 3; pass++) {
        const u32 bins = 1u << width[pass];
        for (int k = 0; k < 4; k++) memset(counts[k], 0, 4 * (size_t)bins);
        for (i64 i = 0; i < n; i++) /* four counters each: neighbours fall into one bin often */
            counts[i & 3][a[i] >> shift[pass] & (bins - 1)]++;
        u32 bin = bins;
        i64 here = 0;
        do {
            above += here;
            bin--;
            here = (i64)counts[0][bin] + counts[1][bin] + counts[2][bin] + counts[3][bin];
        } while (bin > 0 && above + here < rank);
        found |= bin << shift[pass];
        *at_least = above + here;
        i64 kept = 0;
        for (i64 i = 0; i < n; i++) {
            u32 x = a[i];
            a[kept] = x;
            kept += (x >> shift[pass] & (bins - 1)) == bin;
        }
        n = kept;
    }
    return found;
}

INLINE i64 chunk_of(i64 group, i64 stride, u32 seed)
{
    return group * stride + (i64)((u64)hash32((u32)group ^ seed) * (u64)stride >> 32);
}

/* Magnitudes of at least `bound` in every `skip`-th sampled chunk, to `out`. */
INLINE i64 sample_body(const float *restrict r, const float *restrict g, i64 groups, i64 stride,
                       i64 skip, u32 seed, u32 bound, u32 *restrict out)
{
    i64 count = 0;
    for (i64 group = 0; group < groups; group += skip) {
        i64 at = chunk_of(group, stride, seed) * CHUNK;
        i64 later = group + 8 * skip < groups ? group + 8 * skip : group;
        i64 ahead = chunk_of(later, stride, seed) * CHUNK;
        u32 b[CHUNK];
        for (int j = 0; j < CHUNK; j += 16) {
            __builtin_prefetch(r + ahead + j);
            if (g) __builtin_prefetch(g + ahead + j);
        }
        if (g) for (int j = 0; j < CHUNK; j++) b[j] = bits_of(r[at + j] + g[at + j]) & ABS_BITS;
        else for (int j = 0; j < CHUNK; j++) b[j] = bits_of(r[at + j]) & ABS_BITS;
        for (int j = 0; j < CHUNK; j += 8) { /* eight at a time: most hold nothing */
            u32 top = 0;
            for (int k = 0; k < 8; k++) top = b[j + k] > top ? b[j + k] : top;
            if (top < bound) continue;
            for (int k = 0; k < 8; k++) { out[count] = b[j + k]; count += b[j + k] >= bound; }
        }
    }
    return count;
}
VARIANTS(sample, (const float *restrict r, const float *restrict g, i64 groups, i64 stride,
                  i64 skip, u32 seed, u32 bound, u32 *restrict out),
         (r, g, groups, stride, skip, seed, bound, out))

u32 threshold(const float *r, const float *g, i64 n, i64 rank, i64 stride, u32 seed, u32 *scratch,
              i64 *hits)
{
    enum { SKIP = 16 };
    i64 groups = n / CHUNK / stride, count = 0, first = 0;
    u32 bound = 0;
    if (groups >= 4 * SKIP) { /* a sample of the sample bounds from below what need be kept */
        count = sample(r, g, groups, stride, SKIP, seed, 0, scratch);
        double share = (double)rank / SKIP;
        i64 safe = (i64)(share + 8.0 * sqrt(share) + 16.0);
        if (safe <= count) bound = ranked(scratch, count, safe, &first);
    }
    count = sample(r, g, groups, stride, 1, seed, bound, scratch);
    if (count < rank) count = sample(r, g, groups, stride, 1, seed, 0, scratch);
    return ranked(scratch, count, rank, hits);
}

/* The rank-th largest magnitude of x[0..n) (+ g[0..n)), exactly; scratch has room for n. */
u32 threshold_of(const float *restrict x, const float *restrict g, i64 n, i64 rank,
                 u32 *restrict scratch, i64 *hits)
{
    for (i64 i = 0; i < n; i++) scratch[i] = bits_of(g ? x[i] + g[i] : x[i]) & ABS_BITS;
    return ranked(scratch, n, rank, hits);
}

/* Keep, in place, the `wanted` largest: all above `bound` in magnitude, then the first equal to it.
 * What is dropped goes back to r, where r is given. Selects instead of branches: whether an entry
 * is kept cannot be guessed. */
i64 trim(float *restrict r, u32 *restrict idx, float *restrict val, i64 count, u32 bound, i64 wanted)
{
    i64 kept = 0, ties = wanted;
    float nowhere;
    for (i64 i = 0; i < count; i++) ties -= (bits_of(val[i]) & ABS_BITS) > bound;
    for (i64 i = 0; i < count; i++) {
        u32 b = bits_of(val[i]) & ABS_BITS, place = idx[i];
        float x = val[i];
        int keep = (b > bound) | ((b == bound) & (ties > 0));
        ties -= b == bound;
        idx[kept] = place;
        val[kept] = x;
        kept += keep;
        float *back = !r || keep ? &nowhere : r + place;
        *back = x;
    }
    return kept;
}

/* ---- bits in and out ---------------------------------------------------------------------------- */

typedef struct { u8 *at; u64 word; int fill; } writer;

INLINE void put(writer *w, u64 value, int width) /* width <= 56; writes 8 bytes ahead */
{
    w->word |= value << w->fill;
    w->fill += width;
    memcpy(w->at, &w->word, 8);
    int whole = w->fill >> 3;
    w->at += whole;
    w->word = whole == 8 ? 0 : w->word >> (8 * whole);
    w->fill &= 7;
}
INLINE u8 *finish(writer *w)
{
    if (w->fill) *w->at++ = (u8)w->word;
    return w->at;
}

INLINE u64 load64(const u8 *p, const u8 *end) /* eight bytes, zeros where the payload has ended */
{
    u64 v = 0;
    if (end - p >= 8) { memcpy(&v, p, 8); return v; }
    for (i64 i = 0; i < end - p; i++) v |= (u64)p[i] << (8 * i);
    return v;
}

INLINE u8 *put_varint(u8 *p, u32 v)
{
    for (; v >= 128; v >>= 7) *p++ = (u8)(v | 128);
    *p++ = (u8)v;
    return p;
}
/* Bytes read, or a negative number; only the shortest spelling of a number is valid. */
INLINE i64 get_varint(const u8 *p, i64 length, u32 *v)
{
    u64 value = 0;
    for (int i = 0; i < 5; i++) {
        if (i >= length) return BAD_TRUNCATED;
        value |= (u64)(p[i] & 127) << (7 * i);
        if (p[i] < 128) {
            if ((i && !p[i]) || value > 0xffffffffu) return BAD_VARINT;
            *v = (u32)value;
            return i + 1;
        }
    }
    return BAD_VARINT;
}

/* ---- positions: block Rice code ----------------------------------------------------------------
 * varint U, a unary stream of U bytes, a stream of low bits; see docs/reference/codecs.md. Every number in the
 * unary stream is that many zeros and a one: for each block of gaps how far the Rice parameter moved
 * (zigzag), then the quotient of each gap. Low bits: `parameter` bits a gap, or the whole gap after
 * the escape.
 */

INLINE int first_parameter(i64 count, i64 elements)
{
    int r = bit_length((u32)(elements / count)) - 1;
    return r < 0 ? 0 : r > MAX_RICE ? MAX_RICE : r;
}

INLINE u32 gap_cost(const u32 *restrict gap, int m, int r, int whole)
{
    u32 cost = 0;
    for (int i = 0; i < m; i++) {
        u32 q = gap[i] >> r;
        cost += q < ESCAPE ? q + 1 + (u32)r : (u32)(ESCAPE + 1 + whole);
    }
    return cost;
}

/* The cheapest of three parameters around the mean bit length, which a float's exponent tells. */
INLINE int best_parameter(const u32 *restrict gap, int m, int whole)
{
    int lengths = 0, best = 0;
    u32 best_cost = 0xffffffffu;
    for (int i = 0; i < m; i++) {
        int exponent = (int)(bits_of((float)(int)gap[i]) >> 23) - 126;
        lengths += exponent > 0 ? exponent : 0;
    }
    int centre = (10 * lengths + 3 * m) / (10 * m);
    for (int r = centre ? centre - 1 : 0; r <= centre + 1 && r <= MAX_RICE; r++) {
        u32 cost = gap_cost(gap, m, r, whole);
        if (cost < best_cost) { best_cost = cost; best = r; }
    }
    return best;
}

/* Four gaps at once: quotients below ESCAPE, so two of their codes always fit one put. */
INLINE void put_gaps(writer *unary, writer *low, const u32 *restrict gap, int r)
{
    const u64 mask = (1u << r) - 1;
    int a = (int)(gap[0] >> r), b = a + 1 + (int)(gap[1] >> r);
    int c = (int)(gap[2] >> r), d = c + 1 + (int)(gap[3] >> r);
    u64 first = 1ull << a | 1ull << b, second = 1ull << c | 1ull << d;
    if (b + d + 2 <= 56) {
        put(unary, first | second << (b + 1), b + d + 2);
    } else {
        put(unary, first, b + 1);
        put(unary, second, d + 1);
    }
    if (r <= 14) {
        put(low, (gap[0] & mask) | (gap[1] & mask) << r | (gap[2] & mask) << 2 * r
                     | (gap[3] & mask) << 3 * r, 4 * r);
    } else {
        for (int i = 0; i < 4; i++) put(low, gap[i] & mask, r);
    }
}

INLINE void put_gap(writer *unary, writer *low, u32 gap, int r, int whole)
{
    u32 q = gap >> r;
    if (q < ESCAPE) {
        put(unary, 1ull << q, (int)q + 1);
        put(low, gap & ((1u << r) - 1), r);
    } else {
        put(unary, 1ull << ESCAPE, ESCAPE + 1);
        put(low, gap, whole);
    }
}

/* Bytes written to out. `low` is scratch; both have room for 5 * count + 64. Instructions bind it, 29 an
 * entry, with a mispredicted branch in fourteen entries (cachegrind, AVX2, 1 and 10 %). */
INLINE i64 rice_encode_body(const u32 *restrict idx, i64 count, i64 elements, u8 *restrict out,
                            u8 *restrict low)
{
    const int whole = bit_length((u32)elements);
    int r = first_parameter(count, elements);
    u32 next = 0; /* the first position that may come */
    writer unary = {out + 5, 0, 0}, rest = {low, 0, 0};
    for (i64 start = 0; start < count; start += GAP_BLOCK) {
        int m = (int)(count - start < GAP_BLOCK ? count - start : GAP_BLOCK);
        u32 gap[GAP_BLOCK], top = 0;
        gap[0] = idx[start] - next;
        next = idx[start + m - 1] + 1;
        int chosen;
        if (m == GAP_BLOCK) { /* the constant is worth the repetition */
            for (int i = 1; i < GAP_BLOCK; i++) gap[i] = idx[start + i] - idx[start + i - 1] - 1;
            for (int i = 0; i < GAP_BLOCK; i++) top = gap[i] > top ? gap[i] : top;
            chosen = best_parameter(gap, GAP_BLOCK, whole);
        } else {
            for (int i = 1; i < m; i++) gap[i] = idx[start + i] - idx[start + i - 1] - 1;
            chosen = best_parameter(gap, m, whole);
        }
        int moved = chosen - r;
        int zigzag = moved >= 0 ? 2 * moved : -2 * moved - 1;
        if (zigzag > 48) { put(&unary, 0, 48); zigzag -= 48; }
        put(&unary, 1ull << zigzag, zigzag + 1);
        r = chosen;
        if (m == GAP_BLOCK && top >> r < ESCAPE)
            for (int i = 0; i < GAP_BLOCK; i += 4) put_gaps(&unary, &rest, gap + i, r);
        else
            for (int i = 0; i < m; i++) put_gap(&unary, &rest, gap[i], r, whole);
    }
    u8 *unary_end = finish(&unary), *low_end = finish(&rest);
    i64 unary_bytes = unary_end - (out + 5), low_bytes = low_end - low;
    u8 head[5], *head_end = put_varint(head, (u32)unary_bytes);
    i64 head_bytes = head_end - head;
    memmove(out + head_bytes, out + 5, (size_t)unary_bytes);
    memcpy(out, head, (size_t)head_bytes);
    memcpy(out + head_bytes + unary_bytes, low, (size_t)low_bytes);
    return head_bytes + unary_bytes + low_bytes;
}
VARIANTS(rice_encode, (const u32 *restrict idx, i64 count, i64 elements, u8 *restrict out,
                       u8 *restrict low),
         (idx, count, elements, out, low))

/* ---- positions: runs in Huffman code -----------------------------------------------------------
 * What Rice code cannot say briefly: neighbours that are kept together, and gaps of a few lengths.
 * Entries are told as tokens: a gap that is not 0 and the entry after it; a run of entries without
 * gaps; or the gap before the last one again. A token is a symbol in Huffman code (one table after a
 * run, one elsewhere) and the low bits of its number; see docs/reference/codecs.md.
 */

enum {
    AGAIN = 0,         /* symbols: this, then 1 + 4 * class + 2 * aligned + kind */
    SYMBOLS = 129,
    CODE_BITS = 11,    /* of the longest code */
    ONLY = 15,         /* in place of a length: the only symbol of its table, which takes no bits */
    MAX_SHIFT = 7,
    AGAIN_FROM = 4,    /* shorter gaps are cheaper in full */
    LEAST_ENTRIES = 64, /* below, the tables outweigh what they save */
    MANY = 2048         /* fewer are looked at whatever Rice code takes */
};
enum { GAP = 0, RUN = 1, REPEAT = 2 };

typedef struct {
    u32 count[2][SYMBOLS]; /* of each symbol in each context */
    u32 multiples[MAX_SHIFT + 1]; /* numbers by how often 2 divides them */
    i64 tokens, low_bits;
    int shift;
} tally;

typedef struct {
    u8 length[2][SYMBOLS];
    u16 code[2][SYMBOLS];
    writer codes, low;
    int shift;
} token_writer;

typedef void token_taker(void *state, int context, int kind, u32 number);

/* The symbol of a gap, or of the entries of a run and one more, and what follows in how many bits. */
INLINE int symbol_of(u32 number, int kind, int shift, u32 *low, int *width)
{
    int aligned = shift && !(number & ((1u << shift) - 1));
    u32 rest = aligned ? number >> shift : number;
    *width = bit_length(rest) - 1;
    *low = rest & ((1u << *width) - 1);
    return 1 + 4 * *width + 2 * aligned + kind;
}

INLINE void count_multiple(void *state, int context, int kind, u32 number)
{
    tally *t = state;
    int zeros = __builtin_ctz(number);
    (void)context;
    if (kind != REPEAT) t->multiples[zeros < MAX_SHIFT ? zeros : MAX_SHIFT]++;
}

INLINE void count_symbol(void *state, int context, int kind, u32 number)
{
    tally *t = state;
    int width = 0;
    u32 low;
    t->count[context][kind == REPEAT ? AGAIN : symbol_of(number, kind, t->shift, &low, &width)]++;
    t->low_bits += width;
    t->tokens++;
}

INLINE void write_token(void *state, int context, int kind, u32 number)
{
    token_writer *w = state;
    int width = 0;
    u32 low = 0;
    int symbol = kind == REPEAT ? AGAIN : symbol_of(number, kind, w->shift, &low, &width);
    put(&w->codes, w->code[context][symbol], w->length[context][symbol]);
    put(&w->low, low, width);
}

INLINE void each_token(const u32 *restrict idx, i64 count, token_taker *take, void *state)
{
    u32 next = 0, run = 0, last = 0, before = 0; /* entries without a gap; gaps that were not 0 */
    for (i64 i = 0; i < count; i++) {
        u32 gap = idx[i] - next;
        next = idx[i] + 1;
        if (!gap) {
            run++;
            continue;
        }
        if (run) take(state, 0, RUN, run + 1);
        take(state, run > 0, gap == before && gap >= AGAIN_FROM ? REPEAT : GAP, gap);
        run = 0;
        before = last;
        last = gap;
    }
    if (run) take(state, 0, RUN, run + 1);
}

/* log2 in units of 1/256, within 0.01; integers, so that every machine judges alike. Of 0 it is 0. */
INLINE i64 log2_256(u64 x)
{
    if (!x) return 0;
    int e = 63 - __builtin_clzll(x);
    i64 m = (i64)(x << 8 >> e) & 255;
    return 256 * e + m + (88 * m * (256 - m) >> 16);
}

/* Whether Rice code takes 1 to 1.03 of what many positions without any order must, which is
 * log2(n / k) + 1.443 (1 - k / 2n) bits for each of k among n. */
static int looks_uniform(i64 count, i64 elements, i64 rice_bytes)
{
    i64 ratio = log2_256((u64)(elements << 8) / (u64)count) - 8 * 256;
    i64 bound = count * (ratio + 369 - 184 * count / elements), bits = 100 * 256 * 8 * rice_bytes;
    return count >= MANY && 100 * bound <= bits && bits <= 103 * bound;
}

/* Whether tokens may take less than 63/64 of the bytes of Rice code: from the entropy of the bit
 * lengths of gaps, those behind a gap of 0 apart. */
static int worth_a_try(const u32 *restrict idx, i64 count, i64 rice_bytes)
{
    u32 counts[2][32] = {{0}}, after = 0, next = 0;
    i64 bits = 0, low_bits = 0;
    for (i64 i = 0; i < count; i++) {
        int length = bit_length(idx[i] - next);
        next = idx[i] + 1;
        counts[after][length]++;
        low_bits += length - (length > 0);
        after = length == 0;
    }
    for (int context = 0; context < 2; context++) {
        i64 sum = 0;
        for (int i = 0; i < 32; i++) {
            sum += counts[context][i];
            bits -= counts[context][i] * log2_256(counts[context][i]);
        }
        bits += sum * log2_256((u64)sum);
    }
    return 64 * ((bits >> 8) + low_bits) < 63 * 8 * rice_bytes;
}

/* Huffman's lengths: of nodes that weigh alike the first, symbols in their order before what is made
 * of them. Where one is too long, rare symbols weigh more, and all is done again. */
static void code_lengths(const u32 *restrict count, u8 *restrict length)
{
    u32 weight[2 * SYMBOLS];
    int symbol[SYMBOLS], parent[2 * SYMBOLS], depth[2 * SYMBOLS], leaves = 0, longest;
    memset(length, 0, SYMBOLS);
    for (int i = 0; i < SYMBOLS; i++)
        if (count[i]) {
            symbol[leaves] = i;
            weight[leaves++] = count[i];
        }
    if (leaves == 1) length[symbol[0]] = ONLY;
    if (leaves < 2) return;
    const int nodes = 2 * leaves - 1;
    do {
        for (int i = 0; i < nodes; i++) parent[i] = 0;
        for (int made = leaves; made < nodes; made++) {
            weight[made] = 0;
            for (int twice = 0; twice < 2; twice++) {
                int least = -1;
                for (int i = 0; i < made; i++)
                    if (!parent[i] && (least < 0 || weight[i] < weight[least])) least = i;
                parent[least] = made;
                weight[made] += weight[least];
            }
        }
        longest = depth[nodes - 1] = 0;
        for (int i = nodes - 2; i >= 0; i--) {
            depth[i] = depth[parent[i]] + 1;
            if (depth[i] > longest) longest = depth[i];
        }
        for (int i = 0; i < leaves; i++) {
            length[symbol[i]] = (u8)depth[i];
            weight[i] = weight[i] >> 1 | 1;
        }
    } while (longest > CODE_BITS);
}

/* Canonical codes, the first bit lowest. 0, or BAD_TABLE unless every sequence of bits is decodable;
 * a table of nothing is valid too. */
static i64 codes_of(const u8 *restrict length, u16 *restrict code)
{
    int number[CODE_BITS + 1] = {0}, only = 0, used = 0;
    u32 next[CODE_BITS + 1], space = 0, first = 0;
    for (int i = 0; i < SYMBOLS; i++) {
        if (!length[i]) continue;
        used++;
        if (length[i] == ONLY) only++;
        else if (length[i] > CODE_BITS) return BAD_TABLE;
        else number[length[i]]++;
    }
    for (int n = 1; n <= CODE_BITS; n++) {
        next[n] = first = first << 1;
        first += (u32)number[n];
        space += (u32)number[n] << (CODE_BITS - n);
    }
    if (only ? used > 1 : used && space != 1u << CODE_BITS) return BAD_TABLE;
    for (int i = 0; i < SYMBOLS; i++) {
        code[i] = 0;
        if (!length[i] || length[i] == ONLY) continue;
        u32 forward = next[length[i]]++;
        for (int b = 0; b < length[i]; b++) code[i] = (u16)(code[i] << 1 | (forward >> b & 1));
    }
    return 0;
}

/* One more than the highest class of a kind that occurs. */
static int classes_of(const u32 (*count)[SYMBOLS], int kind)
{
    int most = 0;
    for (int context = 0; context < 2; context++)
        for (int i = 1; i < SYMBOLS; i++)
            if (count[context][i] && ((i - 1) & 1) == kind) {
                int classes = ((i - 1) >> 2) + 1;
                most = classes > most ? classes : most;
            }
    return most;
}

/* Every length that a table tells, in order: for each context `again`, then the classes of gaps and,
 * unless after a run, of runs, each plain and, if there is a shift, aligned. */
#define EACH_LENGTH(shift, gap_classes, run_classes) \
    for (int context = 0; context < 2; context++) \
        for (int kind = -1; kind < 2 - context; kind++) \
            for (int aligned = 0; aligned <= (kind >= 0 && (shift) > 0); aligned++) \
                for (int class = 0, symbol; \
                     class < (kind < 0 ? 1 : kind == GAP ? (gap_classes) : (run_classes)) \
                     && (symbol = kind < 0 ? AGAIN : 1 + 4 * class + 2 * aligned + kind, 1); class++)

/* Bytes written to out if these are fewer than 63/64 of `rice_bytes`, else 0, and out is as it was. */
NOINLINE static i64 runs_encode(const u32 *restrict idx, i64 count, i64 elements, i64 rice_bytes,
                                u8 *restrict out, u8 *restrict low)
{
    if (count < LEAST_ENTRIES || elements >= 1ll << 31) return 0;
    if (looks_uniform(count, elements, rice_bytes) || !worth_a_try(idx, count, rice_bytes)) return 0;
    tally t = {0};
    token_writer w;
    each_token(idx, count, count_multiple, &t);
    u64 all = 0, above = 0;
    for (int i = 0; i <= MAX_SHIFT; i++) all += t.multiples[i];
    for (int i = MAX_SHIFT; i > 0 && !t.shift; i--) {
        above += t.multiples[i];
        if (4 * above >= 3 * all) t.shift = i;
    }
    each_token(idx, count, count_symbol, &t);
    const int gap_classes = classes_of((const u32 (*)[SYMBOLS])t.count, GAP);
    const int run_classes = classes_of((const u32 (*)[SYMBOLS])t.count, RUN);
    i64 code_bits = 0, low_bits = 15 + t.low_bits;
    for (int context = 0; context < 2; context++) {
        code_lengths(t.count[context], w.length[context]);
        codes_of(w.length[context], w.code[context]);
    }
    EACH_LENGTH(t.shift, gap_classes, run_classes) {
        u8 length = w.length[context][symbol];
        low_bits += 4;
        if (length != ONLY) code_bits += (i64)t.count[context][symbol] * length;
    }
    i64 code_bytes = (code_bits + 7) / 8, low_bytes = (low_bits + 7) / 8;
    u8 head[11] = {0}, *head_end = put_varint(put_varint(head + 1, (u32)t.tokens), (u32)code_bytes);
    i64 head_bytes = head_end - head, bytes = head_bytes + code_bytes + low_bytes;
    if (64 * bytes >= 63 * rice_bytes) return 0;
    memcpy(out, head, (size_t)head_bytes);
    w.shift = t.shift;
    w.codes = (writer){out + head_bytes, 0, 0};
    w.low = (writer){low, 0, 0};
    put(&w.low, (u64)t.shift | (u64)gap_classes << 3 | (u64)run_classes << 9, 15);
    EACH_LENGTH(t.shift, gap_classes, run_classes) {
        put(&w.low, w.length[context][symbol], 4);
        if (w.length[context][symbol] == ONLY) w.length[context][symbol] = 0;
    }
    each_token(idx, count, write_token, &w);
    finish(&w.codes);
    finish(&w.low);
    memcpy(out + head_bytes + code_bytes, low, (size_t)low_bytes);
    return bytes;
}

/* Bytes written to out: tokens where they are clearly shorter, else Rice code. `low` is scratch; both
 * have room for 5 * count + 64. */
i64 gaps_encode(const u32 *restrict idx, i64 count, i64 elements, u8 *restrict out, u8 *restrict low)
{
    i64 rice_bytes = rice_encode(idx, count, elements, out, low);
    i64 bytes = runs_encode(idx, count, elements, rice_bytes, out, low);
    return bytes ? bytes : rice_bytes;
}

enum { AHEAD = 2048 }; /* ones that are looked up at a time */

typedef struct {
    const u8 *stream, *end; /* the end is the payload's: a load may look past the stream */
    i64 bits, seen;         /* in the stream; looked at, a multiple of 64 */
    int first, count;       /* of the places not taken yet */
    u32 place[AHEAD + 128]; /* bits of the stream that are one, after the one taken last */
} ones;

/* Look up ones until some are at hand, or the stream ends. Eight are written at a time whether there
 * are that many or not: that costs less than to guess how many there are. */
INLINE void look_ahead(ones *s)
{
    memmove(s->place, s->place + s->first, 4 * (size_t)s->count);
    s->first = 0;
    while (s->count < AHEAD && s->seen < s->bits) {
        u64 word = load64(s->stream + (s->seen >> 3), s->end);
        i64 left = s->bits - s->seen;
        if (left < 64) word &= (1ull << left) - 1;
        int now = __builtin_popcountll(word);
        u32 *to = s->place + s->count;
        for (int i = 0; i < now; i += 8)
            for (int j = 0; j < 8; j++, word &= word - 1)
                to[i + j] = (u32)s->seen + (u32)__builtin_ctzll(word | 1ull << 63);
        s->count += now;
        s->seen += 64;
    }
}

/* One gap after the other, each checked. Bits used by then, or a negative number. */
INLINE i64 slow_gaps(const u32 *restrict place, int m, int r, int whole, const u8 *low,
                     const u8 *end, i64 used, u64 *restrict next, u32 *restrict idx)
{
    for (int i = 0; i < m; i++) {
        u32 quotient = place[i + 1] - place[i] - 1;
        u64 bits = load64(low + (used >> 3), end) >> (used & 7), gap;
        if (quotient < ESCAPE) {
            gap = (u64)quotient << r | (bits & ((1u << r) - 1));
            used += r;
        } else {
            gap = bits & ((1ull << whole) - 1);
            if (quotient != ESCAPE || gap >> r < ESCAPE) return BAD_QUOTIENT;
            used += whole;
        }
        if (used > 8 * (end - low)) return BAD_TRUNCATED;
        *next += gap + 1;
        idx[i] = (u32)(*next - 1);
    }
    return used;
}

/* The same for a block without escapes whose loads all stay inside the payload. */
typedef void unpacker(const u32 *place, int r, const u8 *low, i64 used, u64 *next, u32 *idx);

static void fast_gaps(const u32 *restrict place, int r, const u8 *restrict low, i64 used,
                      u64 *restrict next, u32 *restrict idx)
{
    const u32 mask = (1u << r) - 1;
    u64 lows = *next; /* and one for each gap but the first */
    for (int i = 0; i < GAP_BLOCK; i++, used += r) {
        u64 bits;
        memcpy(&bits, low + (used >> 3), 8);
        lows += (u32)(bits >> (used & 7)) & mask;
        idx[i] = (u32)(lows + ((u64)(place[i + 1] - place[0] - (u32)i - 1) << r) + (u64)i);
    }
    *next = lows + ((u64)(place[GAP_BLOCK] - place[0] - GAP_BLOCK) << r) + GAP_BLOCK;
}
#ifdef X86
/* Eight gaps at a time: pdep spreads their low bits, a prefix sum in a register adds them up. */
AVX2 static void fast_gaps_avx2(const u32 *restrict place, int r, const u8 *restrict low, i64 used,
                                u64 *restrict next, u32 *restrict idx)
{
    if (r > 14 || slow_pdep) {
        fast_gaps(place, r, low, used, next, idx);
        return;
    }
    const u64 bytes = 0x0101010101010101ull * ((1u << r) - 1), words = 0x0001000100010001ull * ((1u << r) - 1);
    const __m128i shift = _mm_cvtsi32_si128(r);
    const __m256i none = _mm256_setzero_si256(), last = _mm256_set1_epi32(7);
    __m256i lows = _mm256_set1_epi32((int)(u32)*next); /* of all gaps so far, in every lane */
    __m256i rank = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i start = _mm256_set1_epi32((int)place[0] + 1);
    for (int i = 0; i < GAP_BLOCK; i += 8, used += 8 * r) {
        u64 bits[2];
        __m256i x;
        memcpy(bits, low + (used >> 3), 8);
        if (r <= 7) { /* with the shift, eight times r bits are in one load */
            x = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((i64)_pdep_u64(bits[0] >> (used & 7), bytes)));
        } else {
            i64 half = used + 4 * r;
            memcpy(bits + 1, low + (half >> 3), 8);
            x = _mm256_cvtepu16_epi32(_mm_set_epi64x(
                (i64)_pdep_u64(bits[1] >> (half & 7), words),
                (i64)_pdep_u64(bits[0] >> (used & 7), words)));
        }
        x = _mm256_add_epi32(x, _mm256_slli_si256(x, 4));
        x = _mm256_add_epi32(x, _mm256_slli_si256(x, 8));
        __m256i carry = _mm256_permutevar8x32_epi32(x, _mm256_set1_epi32(3));
        x = _mm256_add_epi32(x, _mm256_blend_epi32(none, carry, 0xf0));
        lows = _mm256_add_epi32(lows, x);
        __m256i here = _mm256_loadu_si256((const __m256i *)(place + 1 + i));
        __m256i quotients = _mm256_sub_epi32(_mm256_sub_epi32(here, start), rank);
        __m256i gaps = _mm256_add_epi32(_mm256_sll_epi32(quotients, shift), rank);
        _mm256_storeu_si256((__m256i *)(idx + i), _mm256_add_epi32(gaps, lows));
        lows = _mm256_permutevar8x32_epi32(lows, last);
        rank = _mm256_add_epi32(rank, _mm256_set1_epi32(8));
    }
    u64 before = *next, sum = (u32)_mm256_cvtsi256_si32(lows) - (u32)before; /* of low bits: small */
    *next = before + sum + ((u64)(place[GAP_BLOCK] - place[0] - GAP_BLOCK) << r) + GAP_BLOCK;
}
#endif
#ifdef NEON
#define fast_gaps_neon fast_gaps
#endif

/* Tokens as they are read. */
typedef struct {
    const u8 *codes;
    i64 code_bits, bit;             /* of the codes; read */
    i64 tokens, run;                /* not read; entries of the last one not told yet */
    u64 last, before;               /* gaps that were not 0 */
    int context, shift;
    u16 entry[2][1 << CODE_BITS];   /* (symbol + 1) << 4 | bits of its code; 0 where there is none */
} runs;

/* Positions that are read some at a time, so that nobody needs room for all of them. */
typedef struct {
    int huffman; /* tokens instead of Rice code */
    runs tokens;
    ones stream;
    const u8 *in, *low, *end;
    i64 count, elements, taken; /* entries; taken is a multiple of GAP_BLOCK until the last are */
    i64 used;                   /* low bits */
    u64 next;                   /* the first position that the next gap may lead to */
    u32 before;                 /* the place of the last one bit */
    int r;
} gaps;

i64 gaps_size(void) { return sizeof(gaps); }

/* `width` low bits, at most 31, to value. 0 or a negative number. */
INLINE i64 take_low(gaps *restrict s, int width, u32 *restrict value)
{
    u64 bits = load64(s->low + (s->used >> 3), s->end) >> (s->used & 7);
    s->used += width;
    *value = (u32)bits & ((1u << width) - 1);
    return s->used > 8 * (s->end - s->low) ? BAD_TRUNCATED : 0;
}

/* What follows the 0 that stands where Rice code has the length of its unary stream. */
NOINLINE static i64 runs_begin(gaps *restrict s, const u8 *at)
{
    runs *t = &s->tokens;
    u32 tokens, code_bytes, value, gap_classes, run_classes;
    u8 length[2][SYMBOLS] = {{0}};
    u16 code[SYMBOLS];
    i64 read = get_varint(at, s->end - at, &tokens);
    if (read < 0) return read;
    at += read;
    read = get_varint(at, s->end - at, &code_bytes);
    if (read < 0) return read;
    at += read;
    if (tokens == 0 || (i64)tokens > s->count) return BAD_COUNT;
    if ((i64)code_bytes > s->end - at) return BAD_TRUNCATED;
    t->codes = at;
    t->code_bits = 8 * (i64)code_bytes;
    t->tokens = tokens;
    t->bit = t->run = 0;
    t->last = t->before = 0;
    t->context = 0;
    s->huffman = 1;
    s->low = at + code_bytes;
    if (take_low(s, 15, &value) < 0) return BAD_TRUNCATED;
    t->shift = (int)(value & 7);
    gap_classes = value >> 3 & 63;
    run_classes = value >> 9;
    if (gap_classes > 32 || run_classes > 32) return BAD_TABLE;
    EACH_LENGTH(t->shift, (int)gap_classes, (int)run_classes) {
        if (take_low(s, 4, &value) < 0) return BAD_TRUNCATED;
        length[context][symbol] = (u8)value;
    }
    for (int context = 0; context < 2; context++) {
        if (codes_of(length[context], code) < 0) return BAD_TABLE;
        memset(t->entry[context], 0, sizeof t->entry[context]);
        for (u32 i = 0; i < SYMBOLS; i++) {
            u32 bits = length[context][i] == ONLY ? 0 : length[context][i];
            if (!length[context][i]) continue;
            for (u32 at_code = code[i]; at_code < 1u << CODE_BITS; at_code += 1u << bits)
                t->entry[context][at_code] = (u16)((i + 1) << 4 | bits);
        }
    }
    return 0;
}

/* As `rice_next` does. */
NOINLINE static i64 runs_next(gaps *restrict s, i64 wanted, u32 *restrict idx)
{
    runs *t = &s->tokens;
    const i64 left = s->count - s->taken, count = left < wanted ? left : wanted;
    const u64 elements = (u64)s->elements;
    u64 next = s->next;
    for (i64 done = 0; done < count;) {
        if (t->run) {
            i64 m = t->run < count - done ? t->run : count - done;
            for (i64 i = 0; i < m; i++) idx[done + i] = (u32)(next + (u64)i);
            next += (u64)m;
            done += m;
            t->run -= m;
            continue;
        }
        if (!t->tokens--) return BAD_COUNT;
        u64 bits = load64(t->codes + (t->bit >> 3), s->end) >> (t->bit & 7);
        u32 entry = t->entry[t->context][bits & ((1u << CODE_BITS) - 1)];
        if (!entry) return BAD_CODE;
        t->bit += entry & 15;
        if (t->bit > t->code_bits) return BAD_TRUNCATED;
        u64 number = t->before;
        u32 symbol = (entry >> 4) - 1;
        if (symbol != AGAIN) {
            int width = (int)(symbol - 1) >> 2;
            u32 low;
            if (take_low(s, width, &low) < 0) return BAD_TRUNCATED;
            number = (u64)(1u << width | low) << ((symbol - 1) & 2 ? t->shift : 0);
            if ((symbol - 1) & RUN) {
                if (number < 2) return BAD_QUOTIENT;
                if (number - 1 > (u64)(left - done)) return BAD_COUNT;
                if (next + number - 1 > elements) return BAD_INDEX;
                t->run = (i64)number - 1;
                t->context = 1;
                continue;
            }
        }
        if (!number) return BAD_QUOTIENT;
        next += number;
        if (next >= elements) return BAD_INDEX;
        idx[done++] = (u32)next++;
        t->context = 0;
        t->before = t->last;
        t->last = number;
    }
    s->taken += count;
    s->next = next;
    return count;
}

static i64 runs_end(const gaps *s)
{
    const runs *t = &s->tokens;
    if (t->tokens || t->run) return BAD_COUNT;
    if ((t->bit + 7) >> 3 != t->code_bits >> 3) return BAD_PADDING;
    if (t->bit & 7 && t->codes[t->bit >> 3] >> (t->bit & 7)) return BAD_PADDING;
    if (s->used & 7 && s->low[s->used >> 3] >> (s->used & 7)) return BAD_PADDING;
    return s->low + ((s->used + 7) >> 3) - s->in;
}

/* 0 or a negative number. Nothing behind `in` may move until the last position is taken. */
i64 gaps_begin(gaps *restrict s, const u8 *in, i64 length, i64 count, i64 elements)
{
    if (count <= 0 || count > elements) return BAD_COUNT;
    u32 unary_bytes;
    i64 head = get_varint(in, length, &unary_bytes);
    if (head < 0) return head;
    s->in = in;
    s->end = s->stream.end = in + length;
    s->count = count;
    s->elements = elements;
    s->taken = s->used = 0;
    s->next = 0;
    s->huffman = 0;
    if (unary_bytes == 0) return runs_begin(s, in + head);
    if ((i64)unary_bytes > length - head) return BAD_TRUNCATED;
    if (8 * (i64)unary_bytes < count || unary_bytes >= 1u << 29) return BAD_COUNT;
    s->low = in + head + unary_bytes;
    s->stream.stream = in + head;
    s->stream.bits = 8 * (i64)unary_bytes;
    s->stream.seen = s->stream.first = s->stream.count = 0;
    s->before = 0xffffffffu; /* the place before the first bit */
    s->r = first_parameter(count, elements);
    return 0;
}

/* The next `wanted` positions (or those that are left) to idx: whole blocks, but for the last ones.
 * They are ascending and below elements. How many, or a negative number. */
INLINE i64 rice_next_body(gaps *restrict s, i64 wanted, u32 *restrict idx, unpacker *unpack)
{
    const i64 count = s->count - s->taken < wanted ? s->count - s->taken : wanted;
    const int whole = bit_length((u32)s->elements);
    const u8 *low = s->low, *end = s->end;
    ones *stream = &s->stream;
    i64 used = s->used;
    int r = s->r;
    u64 next = s->next;
    u32 before = s->before;
    for (i64 start = 0; start < count; start += GAP_BLOCK) {
        int m = (int)(count - start < GAP_BLOCK ? count - start : GAP_BLOCK);
        if (stream->count < 1 + m) look_ahead(stream);
        if (stream->count < 1 + m) return BAD_COUNT;
        const u32 *place = stream->place + stream->first;
        u32 zigzag = place[0] - before - 1, top = 0;
        if (zigzag > 2 * MAX_RICE) return BAD_PARAMETER;
        r += zigzag & 1 ? -(int)(zigzag + 1) / 2 : (int)zigzag / 2;
        if (r < 0 || r > MAX_RICE) return BAD_PARAMETER;
        for (int i = 0; i < m; i++) {
            u32 quotient = place[i + 1] - place[i] - 1;
            top = quotient > top ? quotient : top;
        }
        if (m == GAP_BLOCK && top < ESCAPE && ((used + GAP_BLOCK * r) >> 3) + 8 <= end - low) {
            unpack(place, r, low, used, &next, idx + start);
            used += GAP_BLOCK * r;
        } else {
            used = slow_gaps(place, m, r, whole, low, end, used, &next, idx + start);
            if (used < 0) return used;
        }
        if (next > (u64)s->elements) return BAD_INDEX;
        before = place[m];
        stream->first += 1 + m;
        stream->count -= 1 + m;
    }
    s->taken += count;
    s->used = used;
    s->r = r;
    s->next = next;
    s->before = before;
    return count;
}
FAMILY_VARIANTS(rice_next, fast_gaps, (gaps *restrict s, i64 wanted, u32 *restrict idx),
                s, wanted, idx)

/* The same, in whichever code they are. */
i64 gaps_next(gaps *restrict s, i64 wanted, u32 *restrict idx)
{
    return s->huffman ? runs_next(s, wanted, idx) : rice_next(s, wanted, idx);
}

/* Bytes read, once all positions are taken, or a negative number. */
i64 gaps_end(const gaps *s)
{
    if (s->huffman) return runs_end(s);
    const ones *stream = &s->stream;
    i64 unary_bytes = stream->bits >> 3, used = s->used;
    if (stream->count || stream->seen < stream->bits || (i64)(s->before >> 3) + 1 != unary_bytes)
        return BAD_PADDING;
    if (used & 7 && s->low[used >> 3] >> (used & 7)) return BAD_PADDING;
    return s->low + ((used + 7) >> 3) - s->in;
}

/* All of them. Bytes read, or a negative number. idx has room for count. */
i64 gaps_decode(const u8 *restrict in, i64 length, i64 count, i64 elements, u32 *restrict idx)
{
    gaps state;
    i64 result = gaps_begin(&state, in, length, count, elements);
    if (result == 0) result = gaps_next(&state, count, idx);
    return result < 0 ? result : gaps_end(&state);
}

/* ---- kept values: sign and level planes --------------------------------------------------------
 * f32 anchor; a bf16 mean excess over the anchor for every 128 values; a plane of signs; bits - 1
 * planes of levels. The excess of what a threshold keeps is close to exponential: levels are the
 * Lloyd-Max points of that law. rec gets what the decoder will see.
 */

static const float level_at[4][8] = {
    {1.0f},
    {0.59362426f, 2.59362426f},
    {0.33007874f, 1.17798584f, 2.36523436f, 4.36523436f},
    {0.17534268f, 0.57252912f, 1.0304672f, 1.57116874f, 2.23132622f, 3.07923332f, 4.26648184f,
     6.26648184f},
};
static const float level_edge[4][8] = {
    {0},
    {1.59362426f},
    {0.75403229f, 1.7716101f, 3.36523436f},
    {0.3739359f, 0.80149816f, 1.30081797f, 1.90124748f, 2.65527977f, 3.67285758f, 5.26648184f},
};

INLINE u32 round_bf16(float x) /* ties to even; x is finite */
{
    u32 b = bits_of(x);
    return (b + 0x7fffu + (b >> 16 & 1)) >> 16;
}

INLINE float fold(const float lane[16])
{
    float a[8], b[4];
    for (int j = 0; j < 8; j++) a[j] = lane[j] + lane[j + 8];
    for (int j = 0; j < 4; j++) b[j] = a[j] + a[j + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

INLINE u8 pack8(const u8 flag[8]) /* eight bytes of 0 or 1 to one, the first lowest */
{
    u64 v;
    memcpy(&v, flag, 8);
    return (u8)(v * 0x0102040810204080ull >> 56);
}

/* Sign bits of m floats, eight to a byte, the first lowest. */
typedef void packer(const float *x, int m, u8 *out);

static void pack_signs(const float *restrict x, int m, u8 *restrict out)
{
    for (int i = 0; i < m; i += 8) {
        u32 byte = 0;
        for (int j = 0; j < 8 && i + j < m; j++) byte |= bits_of(x[i + j]) >> 31 << j;
        out[i / 8] = (u8)byte;
    }
}
#ifdef X86
AVX2 static void pack_signs_avx2(const float *restrict x, int m, u8 *restrict out)
{
    int i = 0;
    for (; i + 8 <= m; i += 8) out[i / 8] = (u8)_mm256_movemask_ps(_mm256_loadu_ps(x + i));
    if (i < m) pack_signs(x + i, m - i, out + i / 8);
}
#endif
#ifdef NEON
/* The highest byte of each of 64 elements, one bit of each, and pairs added up three times. */
static void pack_signs_neon(const float *restrict x, int m, u8 *restrict out)
{
    const uint8x16_t place = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull));
    int i = 0;
    for (; i + 64 <= m; i += 64) {
        uint8x16_t bit[4];
        for (int j = 0; j < 4; j++) {
            uint16x8_t v[4];
            for (int k = 0; k < 4; k++)
                v[k] = vreinterpretq_u16_f32(vld1q_f32(x + i + 16 * j + 4 * k));
            uint8x16_t top = vuzp2q_u8(vreinterpretq_u8_u16(vuzp2q_u16(v[0], v[1])),
                                       vreinterpretq_u8_u16(vuzp2q_u16(v[2], v[3])));
            bit[j] = vandq_u8(vcltzq_s8(vreinterpretq_s8_u8(top)), place);
        }
        uint8x16_t four = vpaddq_u8(vpaddq_u8(bit[0], bit[1]), vpaddq_u8(bit[2], bit[3]));
        vst1_u8(out + i / 8, vget_low_u8(vpaddq_u8(four, four)));
    }
    if (i < m) pack_signs(x + i, m - i, out + i / 8);
}
#endif

/* The mean of excess[0..m), rounded to bf16; the rest of the array is zero. */
INLINE u32 mean_bits(const float excess[LEVEL_BLOCK], int m)
{
    float lane[16] = {0};
    for (int i = 0; i < LEVEL_BLOCK; i += 16)
        for (int j = 0; j < 16; j++) lane[j] += excess[i + j];
    float mean = fold(lane) / (float)m;
    u32 stored = round_bf16(mean > 0.0f ? mean : 0.0f), most = (LIMIT_BITS >> 16) - 1;
    return stored < most ? stored : most; /* rounded up to 2^100, no decoder would read it */
}

/* One block: excess mean, signs, levels. m is LEVEL_BLOCK for all but the last. */
INLINE i64 level_block(const float *restrict v, int m, float anchor, int bits, u8 *restrict mean_at,
                       u8 *restrict signs, i64 plane, float *restrict rec, packer *pack)
{
    const int levels = 1 << (bits - 1);
    float magnitude[LEVEL_BLOCK], excess[LEVEL_BLOCK], point[8], edge[8];
    u32 top = 0;
    for (int i = 0; i < m; i++) {
        u32 x = bits_of(v[i]) & ABS_BITS;
        top = x > top ? x : top;
        magnitude[i] = float_of(x);
        excess[i] = float_of(x) - anchor;
    }
    if (top >= LIMIT_BITS) return BAD_MAGNITUDE;
    for (int i = m; i < LEVEL_BLOCK; i++) excess[i] = 0.0f;
    u32 stored = mean_bits(excess, m);
    float mean = float_of(stored << 16);
    memcpy(mean_at, &(u16){(u16)stored}, 2);
    for (int j = 0; j < levels; j++) {
        point[j] = anchor + mean * level_at[bits - 1][j];
        edge[j] = anchor + mean * level_edge[bits - 1][j];
    }
    pack(v, m, signs);
    if (bits <= 2) {
        const float low = point[0], high = point[levels - 1], middle = edge[0];
        for (int i = 0; i < m; i++) {
            float x = bits == 2 && magnitude[i] > middle ? high : low;
            rec[i] = float_of(bits_of(x) | (bits_of(v[i]) & SIGN_BIT));
            magnitude[i] = middle - magnitude[i]; /* negative where the upper level is taken */
        }
        if (bits == 2) pack(magnitude, m, signs + plane);
        return 0;
    }
    u8 level[LEVEL_BLOCK] = {0}, flag[LEVEL_BLOCK];
    for (int j = 0; j + 1 < levels; j++)
        for (int i = 0; i < m; i++) level[i] += magnitude[i] > edge[j];
    for (int i = 0; i < m; i++)
        rec[i] = float_of(bits_of(point[level[i]]) | (bits_of(v[i]) & SIGN_BIT));
    for (int p = 0; p < bits - 1; p++) {
        for (int i = 0; i < LEVEL_BLOCK; i++) flag[i] = level[i] >> p & 1;
        for (int i = 0; i < (m + 7) / 8; i++) signs[(1 + p) * plane + i] = pack8(flag + 8 * i);
    }
    return 0;
}

/* Bytes written, or BAD_MAGNITUDE for a value that is not finite or beyond the limit. */
INLINE i64 levels_encode_body(const float *restrict val, i64 count, float anchor, int bits,
                              u8 *restrict out, float *restrict rec, packer *pack)
{
    i64 blocks = (count + LEVEL_BLOCK - 1) / LEVEL_BLOCK, plane = (count + 7) / 8, result;
    u8 *means = out + 4, *signs = means + 2 * blocks;
    memcpy(out, &anchor, 4);
    for (i64 b = 0, start = 0; b < blocks; b++, start += LEVEL_BLOCK) {
        u8 *here = signs + start / 8;
        if (count - start < LEVEL_BLOCK)
            result = level_block(val + start, (int)(count - start), anchor, bits, means + 2 * b,
                                 here, plane, rec + start, pack);
        else if (bits == 2) /* constants that are worth the repetition */
            result = level_block(val + start, LEVEL_BLOCK, anchor, 2, means + 2 * b, here, plane,
                                 rec + start, pack);
        else
            result = level_block(val + start, LEVEL_BLOCK, anchor, bits, means + 2 * b, here, plane,
                                 rec + start, pack);
        if (result < 0) return result;
    }
    return 4 + 2 * blocks + bits * plane;
}
FAMILY_VARIANTS(levels_encode, pack_signs, (const float *restrict val, i64 count, float anchor, int bits,
                                            u8 *restrict out, float *restrict rec),
                val, count, anchor, bits, out, rec)

/* r += g, then planes of r against zero, and r -= decoded: blocks stay in cache meanwhile. */
INLINE i64 planes_drain_body(float *restrict r, const float *restrict g, i64 n, int bits,
                             u8 *restrict out, packer *pack)
{
    const float anchor = 0.0f;
    i64 blocks = (n + LEVEL_BLOCK - 1) / LEVEL_BLOCK, plane = (n + 7) / 8, result;
    memcpy(out, &anchor, 4);
    for (i64 b = 0, start = 0; b < blocks; b++, start += LEVEL_BLOCK) {
        int m = (int)(n - start < LEVEL_BLOCK ? n - start : LEVEL_BLOCK);
        u8 *mean_at = out + 4 + 2 * b, *here = out + 4 + 2 * blocks + start / 8;
        float *x = r + start, rec[LEVEL_BLOCK];
        for (int i = 0; i < m; i++) x[i] += g[start + i];
        if (m == LEVEL_BLOCK && bits == 2)
            result = level_block(x, LEVEL_BLOCK, 0.0f, 2, mean_at, here, plane, rec, pack);
        else if (m == LEVEL_BLOCK && bits == 1)
            result = level_block(x, LEVEL_BLOCK, 0.0f, 1, mean_at, here, plane, rec, pack);
        else
            result = level_block(x, m, 0.0f, bits, mean_at, here, plane, rec, pack);
        if (result < 0) return result;
        for (int i = 0; i < m; i++) x[i] -= rec[i];
    }
    return 0;
}
FAMILY_VARIANTS(planes_drain, pack_signs, (float *restrict r, const float *restrict g, i64 n,
                                           int bits, u8 *restrict out),
                r, g, n, bits, out)

/* Bytes that `count` values take, if an encoder can have written them; or a negative number. */
i64 levels_check(const u8 *in, i64 length, i64 count, int bits)
{
    i64 blocks = (count + LEVEL_BLOCK - 1) / LEVEL_BLOCK, plane = (count + 7) / 8;
    i64 bytes = 4 + 2 * blocks + bits * plane;
    if (length < bytes) return BAD_TRUNCATED;
    if (bits_of(load_float(in)) >= LIMIT_BITS) return BAD_MAGNITUDE; /* a negative one too */
    if (count & 7)
        for (int p = 0; p < bits; p++)
            if (in[4 + 2 * blocks + (p + 1) * plane - 1] >> (count & 7)) return BAD_PADDING;
    u32 bad = 0;
    for (i64 b = 0; b < blocks; b++) {
        u16 stored;
        memcpy(&stored, in + 4 + 2 * b, 2);
        bad |= (u32)stored << 16 >= LIMIT_BITS;
    }
    return bad ? BAD_MAGNITUDE : bytes;
}

/* Values first .. stop, times the weight, of `count` that have been checked: val = that, or += that.
 * `first` is a multiple of LEVEL_BLOCK. */
INLINE i64 levels_read_body(const u8 *restrict in, i64 count, i64 first, i64 stop, int bits, int add,
                            float weight, float *restrict val)
{
    const int levels = 1 << (bits - 1);
    const float *at = level_at[bits - 1];
    i64 blocks = (count + LEVEL_BLOCK - 1) / LEVEL_BLOCK, plane = (count + 7) / 8;
    const u8 *excesses = in + 4, *signs = excesses + 2 * blocks, *end = signs + bits * plane;
    float anchor = load_float(in);
    for (i64 start = first; start < stop; start += LEVEL_BLOCK) {
        i64 last = start + LEVEL_BLOCK < stop ? start + LEVEL_BLOCK : stop;
        float point[16];
        u16 stored;
        memcpy(&stored, excesses + 2 * (start / LEVEL_BLOCK), 2);
        float mean = float_of((u32)stored << 16);
        for (int j = 0; j < levels; j++) {
            float x = weight * (anchor + mean * at[j]);
            point[2 * j] = x;
            point[2 * j + 1] = -x;
        }
        for (i64 i = start; i < last; i += 64) {
            u64 word[4];
            int m = (int)(last - i < 64 ? last - i : 64);
            float *out = val + (i - first);
            for (int p = 0; p < bits; p++) word[p] = load64(signs + p * plane + i / 8, end);
            for (int j = 0; j < m; j++) {
                u64 code = word[0] >> j & 1;
                for (int p = 1; p < bits; p++) code |= (word[p] >> j & 1) << p;
                out[j] = add ? out[j] + point[code] : point[code];
            }
        }
    }
    return 0;
}
#define LEVELS_READ(bits, add) levels_read_body(in, count, first, stop, bits, add, weight, val)

i64 levels_read(const u8 *restrict in, i64 count, i64 first, i64 stop, int bits, int add,
                float weight, float *restrict val)
{
    if (add)
        return bits == 2 ? LEVELS_READ(2, 1) : bits == 1 ? LEVELS_READ(1, 1)
               : bits == 3 ? LEVELS_READ(3, 1) : LEVELS_READ(4, 1);
    return bits == 2 ? LEVELS_READ(2, 0) : bits == 1 ? LEVELS_READ(1, 0)
           : bits == 3 ? LEVELS_READ(3, 0) : LEVELS_READ(4, 0);
}

/* ---- sparse parts ------------------------------------------------------------------------------- */

/* r[idx] = val - rec: what of the kept elements was not sent. */
i64 write_residual(float *restrict r, const u32 *restrict idx, const float *restrict val,
           const float *restrict rec, i64 count)
{
    for (i64 i = 0; i < count; i++) r[idx[i]] = val[i] - rec[i];
    return 0;
}

/* The bits of the largest magnitude; those of the smallest to `least`. */
INLINE i64 extremes_body(const float *restrict val, i64 count, u32 *restrict least)
{
    u32 top = 0, low = ABS_BITS;
    for (i64 i = 0; i < count; i++) {
        u32 b = bits_of(val[i]) & ABS_BITS;
        top = b > top ? b : top;
        low = b < low ? b : low;
    }
    *least = low;
    return top;
}
VARIANTS(extremes, (const float *restrict val, i64 count, u32 *restrict least), (val, count, least))

/* A whole sparse payload; values as planes (bits 1..4, anchored at the smallest magnitude) or raw
 * (bits 32). Where r is given, r[idx] becomes what was not sent. Bytes written, or a negative number.
 * out has room for 10 * count + 128, scratch for 5 * count + 64, aligned for floats. */
i64 sparse_encode(float *restrict r, const u32 *restrict idx, const float *restrict val, i64 count,
                  i64 elements, int bits, u8 *restrict out, u8 *restrict scratch)
{
    u8 *at = put_varint(out, (u32)count);
    if (!count) return at - out;
    at += gaps_encode(idx, count, elements, at, scratch);
    u32 least;
    if (extremes(val, count, &least) >= LIMIT_BITS) return BAD_MAGNITUDE;
    if (bits == 32) {
        memcpy(at, val, 4 * (size_t)count);
        if (r) for (i64 i = 0; i < count; i++) r[idx[i]] = 0.0f;
        return at + 4 * count - out;
    }
    float *rec = (float *)(void *)scratch;
    i64 written = levels_encode(val, count, float_of(least), bits, at, rec);
    if (written < 0) return written;
    if (r) write_residual(r, idx, val, rec, count);
    return at + written - out;
}

/* The number of entries that a sparse payload announces; to `head` the bytes of that number. */
i64 sparse_head(const u8 *in, i64 length, i64 elements, i64 *head)
{
    u32 count;
    i64 read = get_varint(in, length, &count);
    if (read < 0) return read;
    if ((i64)count > elements) return BAD_COUNT;
    if (count == 0 && length != read) return BAD_TRAILING;
    if ((i64)count > 8 * length) return BAD_COUNT;
    *head = read;
    return count;
}

/* What follows the head of a sparse payload of `count` entries to idx and weight * val; both have
 * room for these. Values are planes (bits 1..4) or raw float32 (bits 32). The count, or a negative
 * number. */
i64 sparse_decode(const u8 *restrict in, i64 length, i64 count, i64 elements, int bits, float weight,
                  u32 *restrict idx, float *restrict val)
{
    if (count == 0) return 0;
    i64 at = gaps_decode(in, length, count, elements, idx), read;
    if (at < 0) return at;
    if (bits == 32) {
        if (length - at < 4 * count) return BAD_TRUNCATED;
        for (i64 i = 0; i < count; i++) {
            float x = load_float(in + at + 4 * i);
            if ((bits_of(x) & ABS_BITS) >= LIMIT_BITS) return BAD_MAGNITUDE;
            val[i] = weight * x;
        }
        read = 4 * count;
    } else {
        read = levels_check(in + at, length - at, count, bits);
        if (read < 0) return read;
        levels_read(in + at, count, 0, count, bits, 0, weight, val);
    }
    return at + read == length ? count : BAD_TRAILING;
}

/* r[idx] = val. */
i64 scatter(float *restrict r, const u32 *restrict idx, const float *restrict val, i64 count)
{
    for (i64 i = 0; i < count; i++) r[idx[i]] = val[i];
    return 0;
}

/* r[idx] += weight * val. */
i64 scatter_add(float *restrict r, const u32 *restrict idx, const float *restrict val, i64 count,
                float weight)
{
    for (i64 i = 0; i < count; i++) r[idx[i]] += weight * val[i];
    return 0;
}

enum { ENTRIES = 2048 }; /* that are decoded at a time where there is no room for all */

INLINE i64 raw_check(const u8 *in, i64 length, i64 count)
{
    if (length < 4 * count) return BAD_TRUNCATED;
    for (i64 i = 0; i < count; i++)
        if ((bits_of(load_float(in + 4 * i)) & ABS_BITS) >= LIMIT_BITS) return BAD_MAGNITUDE;
    return 4 * count;
}

/* Inlined, the next two make gcc compile sparse_decode to code that is 5 % slower. */

/* Whether `sparse_decode` could read this. The count, or a negative number. */
NOINLINE static i64 check_body(const u8 *in, i64 length, i64 count, i64 elements, int bits)
{
    gaps state;
    u32 idx[ENTRIES];
    if (count == 0) return 0;
    i64 at = gaps_begin(&state, in, length, count, elements), read;
    for (i64 i = 0; i < count && at >= 0; i += ENTRIES) at = gaps_next(&state, ENTRIES, idx);
    if (at >= 0) at = gaps_end(&state);
    if (at < 0) return at;
    if (bits == 32) read = raw_check(in + at, length - at, count);
    else read = levels_check(in + at, length - at, count, bits);
    if (read < 0) return read;
    return at + read == length ? count : BAD_TRAILING;
}

/* y[idx] = val, or += weight * val, of what `check_body` let pass, in fixed memory. */
NOINLINE static i64 apply_body(const u8 *in, i64 length, i64 count, i64 elements, int bits, int add,
                               float weight, float *y)
{
    gaps state;
    u32 idx[ENTRIES];
    float val[ENTRIES];
    if (count == 0) return 0;
    i64 values = (count + LEVEL_BLOCK - 1) / LEVEL_BLOCK * 2 + 4 + bits * ((count + 7) / 8);
    const u8 *from = in + length - (bits == 32 ? 4 * count : values);
    gaps_begin(&state, in, length, count, elements);
    for (i64 i = 0; i < count; i += ENTRIES) {
        i64 m = gaps_next(&state, ENTRIES, idx);
        if (bits == 32) for (i64 j = 0; j < m; j++) val[j] = weight * load_float(from + 4 * (i + j));
        else levels_read(from, count, i, i + m, bits, 0, weight, val);
        if (add) for (i64 j = 0; j < m; j++) y[idx[j]] += val[j];
        else for (i64 j = 0; j < m; j++) y[idx[j]] = val[j];
    }
    return count;
}

/* Whether a whole payload is valid. The count, or a negative number. */
i64 sparse_check(const u8 *in, i64 length, i64 elements, int bits)
{
    i64 head = 0, count = sparse_head(in, length, elements, &head);
    return count <= 0 ? count : check_body(in + head, length - head, count, elements, bits);
}

/* y[idx] = val, or += weight * val, of a whole payload that has been checked, in fixed memory. */
i64 sparse_apply(const u8 *in, i64 length, i64 elements, int bits, int add, float weight, float *y)
{
    i64 head = 0, count = sparse_head(in, length, elements, &head);
    return count <= 0 ? count
                      : apply_body(in + head, length - head, count, elements, bits, add, weight, y);
}

/* The heads of many messages: message j has head[j] bytes of it and the entries start[j] ..
 * start[j + 1] of all. The number of all entries, or a negative number. */
i64 sparse_heads(const u8 *const *in, const i64 *length, i64 messages, i64 elements, i64 *start,
                 i64 *head)
{
    start[0] = 0;
    for (i64 j = 0; j < messages; j++) {
        i64 count = sparse_head(in[j], length[j], elements, head + j);
        if (count < 0) return count;
        start[j + 1] = start[j] + count;
    }
    return start[messages];
}

/* All entries of many messages, times their weights, to where `start` says. 0 or a negative number. */
i64 sparse_decode_many(const u8 *const *in, const i64 *length, const float *weight, i64 messages,
                       i64 elements, int bits, const i64 *start, const i64 *head, u32 *idx, float *val)
{
    for (i64 j = 0; j < messages; j++) {
        i64 count = sparse_decode(in[j] + head[j], length[j] - head[j], start[j + 1] - start[j],
                                  elements, bits, weight[j], idx + start[j], val + start[j]);
        if (count < 0) return count;
    }
    return 0;
}

/* y[idx] = val, or += weight * val, of many messages in their order, in fixed memory: each is read
 * twice. With `add` 0 y is zeroed first. 0, or a negative number, and then y is as it was. */
i64 sparse_apply_many(const u8 *const *in, const i64 *length, const float *weight, i64 messages,
                      i64 elements, int bits, const i64 *start, const i64 *head, int add, float *y)
{
    for (i64 j = 0; j < messages; j++) {
        i64 count = check_body(in[j] + head[j], length[j] - head[j], start[j + 1] - start[j], elements,
                               bits);
        if (count < 0) return count;
    }
    if (!add) memset(y, 0, 4 * (size_t)elements);
    for (i64 j = 0; j < messages; j++)
        apply_body(in[j] + head[j], length[j] - head[j], start[j + 1] - start[j], elements, bits, add,
                   weight[j], y);
    return 0;
}

/* y[idx] += val of many messages, tile by tile, in the messages' order: each tile of y is fetched
 * once. Message j has idx[start[j] .. start[j + 1]), ascending and below n. */
i64 scatter_tiles(float *restrict y, i64 n, const u32 *restrict idx, const float *restrict val,
                  const i64 *restrict start, i64 *restrict cursor, i64 messages, i64 tile)
{
    /* Where most lines are hit, reading them in order first is far cheaper than missing each. */
    const int fetch = 64 * start[messages] > n;
    for (i64 j = 0; j < messages; j++) cursor[j] = start[j];
    for (i64 from = 0; from < n; from += tile) {
        i64 stop = from + tile < n ? from + tile : n;
        if (fetch)
            for (i64 i = from; i < stop; i += 16) (void)*(volatile const float *)(y + i);
        for (i64 j = 0; j < messages; j++) {
            i64 i = cursor[j], end = start[j + 1];
            for (; i < end && (i64)idx[i] < stop; i++) y[idx[i]] += val[i];
            cursor[j] = i;
        }
    }
    return 0;
}

/* ---- blockwise codes: a scale for each block, levels -s..s -------------------------------------
 * scale = max|x| / s; code = x / scale, rounded to nearest even or stochastically. Where g is given,
 * r += g first and r -= decoded after; else r is only read. Widths: 8 (int8), 4 (two to a byte, +8), 5
 * (five trits to a byte). Blocks hold 256 elements, of trits 512.
 */

enum { MAX_BLOCK = 512 };
static const float rounder = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */

INLINE i64 code_bytes(i64 m, int width)
{
    return width == 8 ? m : width == 4 ? (m + 1) / 2 : (m + 4) / 5;
}

INLINE void pack_codes(const int *restrict q, int m, int width, u8 *restrict out)
{
    if (width == 8) {
        for (int i = 0; i < m; i++) out[i] = (u8)q[i];
    } else if (width == 4) {
        u8 n[MAX_BLOCK];
        for (int i = 0; i < m; i++) n[i] = (u8)(q[i] + 8);
        for (int i = 0; i < m / 2; i++) out[i] = (u8)(n[2 * i] | n[2 * i + 1] << 4);
        if (m & 1) out[m / 2] = n[m - 1];
    } else { /* byte i holds the elements i, i + run, i + 2 run, ...: lanes, not neighbours */
        int run = (m + 4) / 5;
        u8 t[MAX_BLOCK + 5];
        for (int i = 0; i < m; i++) t[i] = (u8)(q[i] + 1);
        for (int i = m; i < 5 * run; i++) t[i] = 0;
        for (int i = 0; i < run; i++)
            out[i] = (u8)(t[i] + 3 * t[run + i] + 9 * t[2 * run + i] + 27 * t[3 * run + i]
                          + 81 * t[4 * run + i]);
    }
}

/* One block; `first` is the position of its first element, which the noise is drawn from. */
INLINE i64 code_block(float *restrict x, const float *restrict g, int m, int levels, int width,
                      int stochastic, u32 noise, u32 first, u8 *restrict scale_at, u8 *restrict out)
{
    const float most = (float)levels;
    int q[MAX_BLOCK];
    u32 top = 0;
    for (int i = 0; i < m; i++) {
        float v = g ? x[i] + g[i] : x[i];
        u32 b = bits_of(v) & ABS_BITS;
        if (g) x[i] = v;
        top = b > top ? b : top;
    }
    if (top >= LIMIT_BITS) return BAD_MAGNITUDE;
    float scale = top < TINY_BITS ? 0.0f : float_of(top) / most;
    float inverse = top < TINY_BITS ? 0.0f : most / float_of(top);
    memcpy(scale_at, &scale, 4);
    if (width == 8 && !stochastic && g) { /* the sum's last bits are the code: no second array */
        for (int i = 0; i < m; i++) {
            float v = x[i], shifted = v * inverse + rounder;
            out[i] = (u8)(bits_of(shifted) - bits_of(rounder));
            x[i] = v - scale * (shifted - rounder);
        }
        return 0;
    }
    for (int i = 0; i < m; i++) {
        float v = x[i];
        if (stochastic) {
            float u = (float)(int)(hash32((first + (u32)i) ^ noise) >> 8) * 0x1p-24f;
            int code = (int)(v * inverse + u + most);
            q[i] = (code > 2 * levels ? 2 * levels : code) - levels;
        } else {
            q[i] = (int)((v * inverse + rounder) - rounder);
        }
        if (g) x[i] = v - scale * (float)q[i];
    }
    pack_codes(q, m, width, out);
    return 0;
}

INLINE i64 code_blocks(float *restrict r, const float *restrict g, i64 n, int block, int levels,
                       int width, int stochastic, u32 noise, u8 *restrict scales,
                       u8 *restrict codes)
{
    i64 start = 0, result = 0;
    for (; start + block <= n && !result; start += block)
        result = code_block(r + start, g ? g + start : NULL, block, levels, width, stochastic, noise,
                            (u32)start, scales + 4 * (start / block),
                            codes + start / block * code_bytes(block, width));
    if (start < n && !result)
        result = code_block(r + start, g ? g + start : NULL, (int)(n - start), levels, width,
                            stochastic, noise, (u32)start, scales + 4 * (start / block),
                            codes + start / block * code_bytes(block, width));
    return result;
}

#ifdef X86
/* int8 with feedback: a block fits sixteen registers, so it is neither stored nor read in between. */
AVX512 static i64 int8_drain_avx512(float *restrict r, const float *restrict g, i64 n,
                                    u8 *restrict scales, u8 *restrict codes)
{
    const __m512i magnitude = _mm512_set1_epi32((int)ABS_BITS);
    const __m512 round = _mm512_set1_ps(rounder);
    for (i64 start = 0; start + 256 <= n; start += 256) {
        __m512 x[16];
        __m512i top = _mm512_setzero_si512();
        for (int j = 0; j < 16; j++) {
            i64 i = start + 16 * j;
            x[j] = _mm512_add_ps(_mm512_loadu_ps(r + i), _mm512_loadu_ps(g + i));
            top = _mm512_max_epu32(top, _mm512_and_si512(_mm512_castps_si512(x[j]), magnitude));
        }
        u32 most = _mm512_reduce_max_epu32(top);
        if (most >= LIMIT_BITS) return BAD_MAGNITUDE;
        float scale = most < TINY_BITS ? 0.0f : float_of(most) / 127.0f;
        __m512 inverse = _mm512_set1_ps(most < TINY_BITS ? 0.0f : 127.0f / float_of(most));
        memcpy(scales + start / 64, &scale, 4);
        for (int j = 0; j < 16; j++) {
            __m512 shifted = _mm512_add_ps(_mm512_mul_ps(x[j], inverse), round);
            __m512 sent = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_sub_ps(shifted, round));
            _mm_storeu_si128((__m128i *)(codes + start + 16 * j),
                             _mm512_cvtepi32_epi8(_mm512_castps_si512(shifted)));
            _mm512_storeu_ps(r + start + 16 * j, _mm512_sub_ps(x[j], sent));
        }
    }
    i64 whole = n & ~255ll;
    if (whole == n) return 0;
    return code_block(r + whole, g + whole, (int)(n - whole), 127, 8, 0, 0, 0, scales + whole / 64,
                      codes + whole);
}
#endif

/* One loop for each shape, so that each is compiled without the questions. */
INLINE i64 blocks_encode_body(float *restrict r, const float *restrict g, i64 n, int levels,
                              int width, int stochastic, u32 noise, u8 *restrict scales,
                              u8 *restrict codes)
{
#define CODE(g, block, width, stochastic) \
    code_blocks(r, g, n, block, levels, width, stochastic, noise, scales, codes)
    if (width == 5) return g ? CODE(g, 512, 5, 1) : CODE(NULL, 512, 5, 1);
    if (width == 4 && stochastic) return g ? CODE(g, 256, 4, 1) : CODE(NULL, 256, 4, 1);
    if (width == 4) return g ? CODE(g, 256, 4, 0) : CODE(NULL, 256, 4, 0);
    if (stochastic) return g ? CODE(g, 256, 8, 1) : CODE(NULL, 256, 8, 1);
    return g ? CODE(g, 256, 8, 0) : CODE(NULL, 256, 8, 0);
#undef CODE
}
#ifdef X86
static i64 blocks_encode_portable(float *restrict r, const float *restrict g, i64 n, int levels,
                                  int width, int stochastic, u32 noise, u8 *restrict scales,
                                  u8 *restrict codes)
{
    return blocks_encode_body(r, g, n, levels, width, stochastic, noise, scales, codes);
}
AVX2 static i64 blocks_encode_avx2(float *restrict r, const float *restrict g, i64 n, int levels,
                                   int width, int stochastic, u32 noise, u8 *restrict scales,
                                   u8 *restrict codes)
{
    return blocks_encode_body(r, g, n, levels, width, stochastic, noise, scales, codes);
}
#endif

i64 blocks_encode(float *restrict r, const float *restrict g, i64 n, int levels, int width,
                  int stochastic, u32 noise, u8 *restrict scales, u8 *restrict codes)
{
#ifdef X86
    if (tier == 2 && g && levels == 127 && width == 8 && !stochastic)
        return int8_drain_avx512(r, g, n, scales, codes);
    if (tier) return blocks_encode_avx2(r, g, n, levels, width, stochastic, noise, scales, codes);
    return blocks_encode_portable(r, g, n, levels, width, stochastic, noise, scales, codes);
#else
    return blocks_encode_body(r, g, n, levels, width, stochastic, noise, scales, codes);
#endif
}

INLINE void unpack_codes(const u8 *restrict in, int m, int width, int *restrict q)
{
    if (width == 8) {
        for (int i = 0; i < m; i++) q[i] = (int8_t)in[i];
    } else if (width == 4) {
        for (int i = 0; i < m / 2; i++) {
            q[2 * i] = (in[i] & 15) - 8;
            q[2 * i + 1] = (in[i] >> 4) - 8;
        }
        if (m & 1) q[m - 1] = (in[m / 2] & 15) - 8;
    } else {
        int run = (m + 4) / 5;
        u16 left[MAX_BLOCK / 5 + 1];
        for (int i = 0; i < run; i++) left[i] = in[i];
        for (int d = 0; d < 5; d++) {
            int stop = m - d * run < run ? m - d * run : run;
            for (int i = 0; i < stop; i++) {
                u16 third = (u16)(left[i] * 171 >> 9); /* exact below 256 */
                q[d * run + i] = left[i] - 3 * third - 1;
                left[i] = third;
            }
        }
    }
}

/* 0 if the scales and codes of a payload of the right length are ones an encoder can write. */
INLINE i64 blocks_check_body(const u8 *restrict scales, const u8 *restrict codes, i64 n, int levels,
                             int width)
{
    static const int power[5] = {1, 3, 9, 27, 81};
    const int block = width == 5 ? 512 : 256;
    int bad = 0;
    for (i64 start = 0; start < n; start += block) {
        int m = (int)(n - start < block ? n - start : block), q[MAX_BLOCK] = {0};
        const u8 *code = codes + start / block * code_bytes(block, width);
        if (bits_of(load_float(scales + 4 * (start / block))) >= LIMIT_BITS) return BAD_MAGNITUDE;
        if (width == 4 && m & 1 && code[m / 2] >> 4) return BAD_PADDING;
        if (width == 5) {
            int run = (m + 4) / 5;
            for (int i = 0; i < run; i++) bad |= code[i] >= 243;
            for (int i = m; i < 5 * run; i++) bad |= code[i % run] / power[i / run] % 3 != 0;
        } else {
            unpack_codes(code, m, width, q);
            for (int i = 0; i < m; i++) bad |= (q[i] > levels) | (q[i] < -levels);
        }
    }
    return bad ? BAD_CODE : 0;
}
VARIANTS(blocks_check, (const u8 *restrict scales, const u8 *restrict codes, i64 n, int levels,
                        int width),
         (scales, codes, n, levels, width))

/* y = decoded, or y += weight * decoded. The payload has been checked. */
INLINE i64 blocks_decode_body(const u8 *restrict scales, const u8 *restrict codes, i64 n, int width,
                              int add, float weight, float *restrict y)
{
    const int block = width == 5 ? 512 : 256;
    for (i64 start = 0; start < n; start += block) {
        int m = (int)(n - start < block ? n - start : block), q[MAX_BLOCK];
        float scale = load_float(scales + 4 * (start / block)), *out = y + start;
        unpack_codes(codes + start / block * code_bytes(block, width), m, width, q);
        if (add) for (int i = 0; i < m; i++) out[i] += weight * (scale * (float)q[i]);
        else for (int i = 0; i < m; i++) out[i] = scale * (float)q[i];
    }
    return 0;
}
VARIANTS(blocks_decode, (const u8 *restrict scales, const u8 *restrict codes, i64 n, int width,
                         int add, float weight, float *restrict y),
         (scales, codes, n, width, add, weight, y))

/* ---- signs: one bit an element, the block's mean magnitude -------------------------------------- */

enum { SIGN_BLOCK = 512 };

/* Sign bits of m floats to `out`; then x -= scale, with the sign of x. */
typedef void taker(float *x, int m, float scale, u8 *out);

static void take_signs(float *restrict x, int m, float scale, u8 *restrict out)
{
    pack_signs(x, m, out);
    for (int i = 0; i < m; i++) x[i] -= float_of(bits_of(scale) | (bits_of(x[i]) & SIGN_BIT));
}
#ifdef X86
AVX2 static void take_signs_avx2(float *restrict x, int m, float scale, u8 *restrict out)
{
    const __m256 sign = _mm256_set1_ps(-0.0f), magnitude = _mm256_set1_ps(scale);
    int i = 0;
    for (; i + 8 <= m; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        out[i / 8] = (u8)_mm256_movemask_ps(v);
        _mm256_storeu_ps(
            x + i, _mm256_sub_ps(v, _mm256_or_ps(magnitude, _mm256_and_ps(v, sign))));
    }
    if (i < m) take_signs(x + i, m - i, scale, out + i / 8);
}
#endif
#ifdef NEON
static void take_signs_neon(float *restrict x, int m, float scale, u8 *restrict out)
{
    pack_signs_neon(x, m, out);
    for (int i = 0; i < m; i++) x[i] -= float_of(bits_of(scale) | (bits_of(x[i]) & SIGN_BIT));
}
#endif

INLINE i64 sign_block(float *restrict x, const float *restrict g, int m, u8 *restrict scale_at,
                      u8 *restrict out, taker *take)
{
    float lane[16] = {0};
    int whole = m & ~15;
    for (int i = 0; i < whole; i += 16)
        for (int j = 0; j < 16; j++) {
            float v = x[i + j] + g[i + j];
            x[i + j] = v;
            lane[j] += fabsf(v);
        }
    for (int i = whole; i < m; i++) {
        x[i] += g[i];
        lane[i - whole] += fabsf(x[i]);
    }
    float scale = fold(lane) / (float)m;
    if (!(scale < 0x1p100f)) return BAD_MAGNITUDE;
    memcpy(scale_at, &scale, 4);
    take(x, m, scale, out);
    return 0;
}

/* r += g, then scales and signs, and r -= decoded. */
INLINE i64 signs_drain_body(float *restrict r, const float *restrict g, i64 n, u8 *restrict scales,
                            u8 *restrict bits, taker *take)
{
    i64 start = 0, result = 0;
    for (; start + SIGN_BLOCK <= n && !result; start += SIGN_BLOCK)
        result = sign_block(r + start, g + start, SIGN_BLOCK, scales + 4 * (start / SIGN_BLOCK),
                            bits + start / 8, take);
    if (start < n && !result)
        result = sign_block(r + start, g + start, (int)(n - start),
                            scales + 4 * (start / SIGN_BLOCK), bits + start / 8, take);
    return result;
}
FAMILY_VARIANTS(signs_drain, take_signs, (float *restrict r, const float *restrict g, i64 n,
                                          u8 *restrict scales, u8 *restrict bits),
                r, g, n, scales, bits)

INLINE i64 signs_encode_body(const float *restrict x, i64 n, u8 *restrict scales, u8 *restrict bits,
                             packer *pack)
{
    for (i64 start = 0; start < n; start += SIGN_BLOCK) {
        int m = (int)(n - start < SIGN_BLOCK ? n - start : SIGN_BLOCK), whole = m & ~15;
        const float *v = x + start;
        float lane[16] = {0}, scale;
        for (int i = 0; i < whole; i += 16)
            for (int j = 0; j < 16; j++) lane[j] += fabsf(v[i + j]);
        for (int i = whole; i < m; i++) lane[i - whole] += fabsf(v[i]);
        scale = fold(lane) / (float)m;
        if (!(scale < 0x1p100f)) return BAD_MAGNITUDE;
        memcpy(scales + 4 * (start / SIGN_BLOCK), &scale, 4);
        pack(v, m, bits + start / 8);
    }
    return 0;
}
FAMILY_VARIANTS(signs_encode, pack_signs, (const float *restrict x, i64 n, u8 *restrict scales,
                                           u8 *restrict bits),
                x, n, scales, bits)

/* 0 if the scales of a payload of the right length, and its last bits, are valid. */
i64 signs_check(const u8 *restrict scales, const u8 *restrict bits, i64 n)
{
    for (i64 b = 0; b * SIGN_BLOCK < n; b++)
        if (bits_of(load_float(scales + 4 * b)) >= LIMIT_BITS) return BAD_MAGNITUDE;
    return n & 7 && bits[n / 8] >> (n & 7) ? BAD_PADDING : 0;
}

/* y = value with the signs in `bits`, or y += that. */
typedef void giver(const u8 *bits, int m, u32 value, int add, float *y);

static void give_signs(const u8 *restrict bits, int m, u32 value, int add, float *restrict y)
{
    for (int i = 0; i < m; i++) {
        float x = float_of(value ^ (u32)(bits[i / 8] >> (i & 7) & 1) << 31);
        y[i] = add ? y[i] + x : x;
    }
}
#ifdef X86
AVX2 static void give_signs_avx2(const u8 *restrict bits, int m, u32 value, int add,
                                 float *restrict y)
{
    const __m256i place = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    const __m256i sign = _mm256_set1_epi32((int)SIGN_BIT), v = _mm256_set1_epi32((int)value);
    int i = 0;
    for (; i + 8 <= m; i += 8) {
        __m256i flip = _mm256_and_si256(
            _mm256_sllv_epi32(_mm256_set1_epi32(bits[i / 8]), place), sign);
        __m256 x = _mm256_castsi256_ps(_mm256_xor_si256(v, flip));
        _mm256_storeu_ps(y + i, add ? _mm256_add_ps(_mm256_loadu_ps(y + i), x) : x);
    }
    if (i < m) give_signs(bits + i / 8, m - i, value, add, y + i);
}
#endif
#ifdef NEON
static void give_signs_neon(const u8 *restrict bits, int m, u32 value, int add, float *restrict y)
{
    static const int32_t shift[8] = {31, 30, 29, 28, 27, 26, 25, 24};
    const uint32x4_t sign = vdupq_n_u32(SIGN_BIT), v = vdupq_n_u32(value);
    int i = 0;
    for (; i + 8 <= m; i += 8)
        for (int half = 0; half < 8; half += 4) {
            uint32x4_t byte = vshlq_u32(vdupq_n_u32(bits[i / 8]), vld1q_s32(shift + half));
            float32x4_t x = vreinterpretq_f32_u32(veorq_u32(v, vandq_u32(byte, sign)));
            float *out = y + i + half;
            vst1q_f32(out, add ? vaddq_f32(vld1q_f32(out), x) : x);
        }
    if (i < m) give_signs(bits + i / 8, m - i, value, add, y + i);
}
#endif

/* y = decoded, or y += weight * decoded. The payload has been checked. */
INLINE i64 signs_decode_body(const u8 *restrict scales, const u8 *restrict bits, i64 n, int add,
                             float weight, float *restrict y, giver *give)
{
    for (i64 start = 0; start < n; start += SIGN_BLOCK) {
        int m = (int)(n - start < SIGN_BLOCK ? n - start : SIGN_BLOCK);
        float scale = load_float(scales + 4 * (start / SIGN_BLOCK));
        if (add) give(bits + start / 8, m, bits_of(weight * scale), 1, y + start);
        else give(bits + start / 8, m, bits_of(scale), 0, y + start);
    }
    return 0;
}
FAMILY_VARIANTS(signs_decode, give_signs, (const u8 *restrict scales, const u8 *restrict bits, i64 n,
                                           int add, float weight, float *restrict y),
                scales, bits, n, add, weight, y)

/* ---- half precision: binary16 (which saturates) and bfloat16 -------------------------------------
 * Integers only, so that every machine rounds alike. A NaN stays a NaN, but only its sign is kept.
 */

INLINE u32 to_half(u32 b)
{
    u32 sign = b >> 16 & 0x8000u, x = b & ABS_BITS, most = 0x477fe000u; /* 65504 */
    u32 finite = x > most ? most : x;
    u32 small = bits_of(float_of(finite) + 0.5f) - 0x3f000000u; /* below 2^-14: the sum rounds */
    u32 normal = (finite - 0x38000000u + 0xfffu + (finite >> 13 & 1)) >> 13;
    return sign | (x > 0x7f800000u ? 0x7e00u : finite < 0x38800000u ? small : normal);
}
INLINE u32 from_half(u32 h)
{
    u32 sign = (h & 0x8000u) << 16, x = (h & 0x7fffu) << 13;
    u32 small = bits_of(float_of(x + 0x38800000u) - float_of(0x38800000u));
    u32 special = (h & 0x7fffu) > 0x7c00u ? 0x7fc00000u : 0x7f800000u;
    return sign | (x >= 0x0f800000u ? special : x < 0x00800000u ? small : x + 0x38000000u);
}
INLINE u32 to_bf16(u32 b)
{
    u32 rounded = (b + 0x7fffu + (b >> 16 & 1)) >> 16;
    return (b & ABS_BITS) > 0x7f800000u ? (b >> 16 & 0x8000u) | 0x7fc0u : rounded;
}
INLINE u32 from_bf16(u32 h)
{
    return (h & 0x7fffu) > 0x7f80u ? (h & 0x8000u) << 16 | 0x7fc00000u : h << 16;
}

typedef u16 __attribute__((aligned(1), may_alias)) loose; /* a payload may begin anywhere */

INLINE void halves(float *restrict r, const float *restrict g, i64 n, int brain, u8 *restrict out)
{
    loose *restrict to = (loose *)out;
    for (i64 i = 0; i < n; i++) {
        float x = g ? r[i] + g[i] : r[i];
        u32 h = brain ? to_bf16(bits_of(x)) : to_half(bits_of(x));
        to[i] = (u16)h;
        if (g) r[i] = x - float_of(brain ? from_bf16(h) : from_half(h));
    }
}

/* Two bytes an element. Where g is given: r += g first, r -= decoded after; else r is only read. */
INLINE i64 halves_encode_body(float *restrict r, const float *restrict g, i64 n, int brain,
                              u8 *restrict out)
{
    if (g && brain) halves(r, g, n, 1, out);
    else if (g) halves(r, g, n, 0, out);
    else if (brain) halves(r, NULL, n, 1, out);
    else halves(r, NULL, n, 0, out);
    return 0;
}
VARIANTS(halves_encode, (float *restrict r, const float *restrict g, i64 n, int brain,
                         u8 *restrict out),
         (r, g, n, brain, out))

/* y = decoded, or y += weight * decoded. */
INLINE i64 halves_decode_body(const u8 *restrict in, i64 n, int brain, int add, float weight,
                              float *restrict y)
{
    const loose *restrict from = (const loose *)in;
    for (i64 i = 0; i < n; i++) {
        float x = float_of(brain ? from_bf16(from[i]) : from_half(from[i]));
        y[i] = add ? y[i] + weight * x : x;
    }
    return 0;
}
VARIANTS(halves_decode, (const u8 *restrict in, i64 n, int brain, int add, float weight,
                         float *restrict y),
         (in, n, brain, add, weight, y))
