/* XXH3, 64 and 128 bit, with seed: written from the published specification (xxHash, doc/xxhash_spec.md, "XXH3").
 *
 * The hash has five input classes: 0, 1-16, 17-128, 129-240 and above 240 bytes. The short ones are straight-line
 * 64x64->128 multiplications against a 192-byte secret. The long one keeps eight 64-bit lanes: a stripe (64 bytes) is
 * accumulated into them, sixteen stripes make a block (1 KiB), after which the lanes are scrambled. Only that loop is
 * worth vector code, so only it has variants (scalar, SSE2, AVX2, AVX-512). The best one that the CPU can run is chosen
 * once, at import; no compiler flag depends on the machine that builds.
 *
 * What must hold: every variant returns the same value as all others and as the reference implementation, for every
 * length, seed and alignment. The checksums are stored on disk, so the function can never change.
 *
 * Over 400 lines because a hash function is one idea; its constants and the vector code take half of them.
 */
#ifndef KVSTORE_XXH3_H
#define KVSTORE_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kvstore supports little-endian machines only"
#endif

#if defined(__x86_64__)
#define XXH3_X86 1
#include <immintrin.h>
#endif

#define XXH3_STRIPE 64
#define XXH3_BLOCK 1024
#define XXH3_BLOCK_STRIPES 16
#define XXH3_SECRET_BYTES 192

#define XXH3_P32_1 0x9E3779B1u
#define XXH3_P32_2 0x85EBCA77u
#define XXH3_P32_3 0xC2B2AE3Du
#define XXH3_P64_1 0x9E3779B185EBCA87ull
#define XXH3_P64_2 0xC2B2AE3D27D4EB4Full
#define XXH3_P64_3 0x165667B19E3779F9ull
#define XXH3_P64_4 0x85EBCA77C2B2AE63ull
#define XXH3_P64_5 0x27D4EB2F165667C5ull
#define XXH3_MX1 0x165667919E3779F9ull
#define XXH3_MX2 0x9FB21C651E98DF25ull

typedef struct {
    uint64_t low, high;
} xxh3_u128;

static const uint8_t xxh3_secret[XXH3_SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

/* ---- words ---- */

static inline uint32_t xxh3_r32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static inline uint64_t xxh3_r64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static inline void xxh3_w64(uint8_t *p, uint64_t v) {
    memcpy(p, &v, 8);
}

/* The canonical form of a 128-bit sum: big-endian, high half first; the xxhash package's xxh3_128_digest. */
static inline void xxh3_canonical(uint8_t out[16], xxh3_u128 h) {
    xxh3_w64(out, __builtin_bswap64(h.high));
    xxh3_w64(out + 8, __builtin_bswap64(h.low));
}

static inline xxh3_u128 xxh3_mul(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    xxh3_u128 r = {(uint64_t)product, (uint64_t)(product >> 64)};
    return r;
}

static inline uint64_t xxh3_fold(uint64_t a, uint64_t b) {
    xxh3_u128 r = xxh3_mul(a, b);
    return r.low ^ r.high;
}

static inline uint64_t xxh3_rotl64(uint64_t v, int n) { return (v << n) | (v >> (64 - n)); }

static inline uint64_t xxh3_avalanche(uint64_t h) {
    h = (h ^ (h >> 37)) * XXH3_MX1;
    return h ^ (h >> 32);
}

static inline uint64_t xxh3_avalanche_xxh64(uint64_t h) {
    h = (h ^ (h >> 33)) * XXH3_P64_2;
    h = (h ^ (h >> 29)) * XXH3_P64_3;
    return h ^ (h >> 32);
}

static inline uint64_t xxh3_mix16(const uint8_t *in, const uint8_t *secret, uint64_t seed) {
    return xxh3_fold(xxh3_r64(in) ^ (xxh3_r64(secret) + seed), xxh3_r64(in + 8) ^ (xxh3_r64(secret + 8) - seed));
}

/* ---- 0 to 240 bytes, 64 bit ---- */

static inline uint32_t xxh3_pack_1to3(const uint8_t *in, size_t len) {
    return ((uint32_t)in[0] << 16) | ((uint32_t)in[len >> 1] << 24) | in[len - 1] | ((uint32_t)len << 8);
}

static inline uint64_t xxh3_seed_4to8(uint64_t seed) {
    return seed ^ ((uint64_t)__builtin_bswap32((uint32_t)seed) << 32);
}

static inline uint64_t xxh3_64_to16(const uint8_t *in, size_t len, uint64_t seed) {
    const uint8_t *s = xxh3_secret;
    if (len > 8) {
        uint64_t low = xxh3_r64(in) ^ ((xxh3_r64(s + 24) ^ xxh3_r64(s + 32)) + seed);
        uint64_t high = xxh3_r64(in + len - 8) ^ ((xxh3_r64(s + 40) ^ xxh3_r64(s + 48)) - seed);
        return xxh3_avalanche(len + __builtin_bswap64(low) + high + xxh3_fold(low, high));
    }
    if (len >= 4) {
        uint64_t flip = (xxh3_r64(s + 8) ^ xxh3_r64(s + 16)) - xxh3_seed_4to8(seed);
        uint64_t h = (xxh3_r32(in + len - 4) + ((uint64_t)xxh3_r32(in) << 32)) ^ flip;
        h ^= xxh3_rotl64(h, 49) ^ xxh3_rotl64(h, 24);
        h *= XXH3_MX2;
        h ^= (h >> 35) + len;
        h *= XXH3_MX2;
        return h ^ (h >> 28);
    }
    if (len)
        return xxh3_avalanche_xxh64(xxh3_pack_1to3(in, len) ^ ((uint64_t)(xxh3_r32(s) ^ xxh3_r32(s + 4)) + seed));
    return xxh3_avalanche_xxh64(seed ^ xxh3_r64(s + 56) ^ xxh3_r64(s + 64));
}

static inline uint64_t xxh3_64_to128(const uint8_t *in, size_t len, uint64_t seed) {
    uint64_t acc = len * XXH3_P64_1;
    for (size_t i = (len - 1) / 32 + 1; i-- > 0;) {
        acc += xxh3_mix16(in + 16 * i, xxh3_secret + 32 * i, seed);
        acc += xxh3_mix16(in + len - 16 * (i + 1), xxh3_secret + 32 * i + 16, seed);
    }
    return xxh3_avalanche(acc);
}

static inline uint64_t xxh3_64_to240(const uint8_t *in, size_t len, uint64_t seed) {
    uint64_t acc = len * XXH3_P64_1;
    for (size_t i = 0; i < 8; i++) acc += xxh3_mix16(in + 16 * i, xxh3_secret + 16 * i, seed);
    acc = xxh3_avalanche(acc);
    for (size_t i = 8; i < len / 16; i++) acc += xxh3_mix16(in + 16 * i, xxh3_secret + 16 * (i - 8) + 3, seed);
    acc += xxh3_mix16(in + len - 16, xxh3_secret + 136 - 17, seed);
    return xxh3_avalanche(acc);
}

/* ---- 0 to 240 bytes, 128 bit ---- */

static inline xxh3_u128 xxh3_128_to16(const uint8_t *in, size_t len, uint64_t seed) {
    const uint8_t *s = xxh3_secret;
    xxh3_u128 h;
    if (len > 8) {
        uint64_t flip_low = (xxh3_r64(s + 32) ^ xxh3_r64(s + 40)) - seed;
        uint64_t flip_high = (xxh3_r64(s + 48) ^ xxh3_r64(s + 56)) + seed;
        uint64_t low = xxh3_r64(in), high = xxh3_r64(in + len - 8);
        xxh3_u128 m = xxh3_mul(low ^ high ^ flip_low, XXH3_P64_1);
        m.low += (uint64_t)(len - 1) << 54;
        high ^= flip_high;
        m.high += high + (uint64_t)(uint32_t)high * (XXH3_P32_2 - 1);
        m.low ^= __builtin_bswap64(m.high);
        h = xxh3_mul(m.low, XXH3_P64_2);
        h.high += m.high * XXH3_P64_2;
        h.low = xxh3_avalanche(h.low);
        h.high = xxh3_avalanche(h.high);
        return h;
    }
    if (len >= 4) {
        uint64_t flip = (xxh3_r64(s + 16) ^ xxh3_r64(s + 24)) + xxh3_seed_4to8(seed);
        uint64_t keyed = (xxh3_r32(in) + ((uint64_t)xxh3_r32(in + len - 4) << 32)) ^ flip;
        h = xxh3_mul(keyed, XXH3_P64_1 + (len << 2));
        h.high += h.low << 1;
        h.low ^= h.high >> 3;
        h.low = (h.low ^ (h.low >> 35)) * XXH3_MX2;
        h.low ^= h.low >> 28;
        h.high = xxh3_avalanche(h.high);
        return h;
    }
    if (len) {
        uint32_t low = xxh3_pack_1to3(in, len), swapped = __builtin_bswap32(low);
        uint32_t high = (swapped << 13) | (swapped >> 19);
        h.low = xxh3_avalanche_xxh64(low ^ ((uint64_t)(xxh3_r32(s) ^ xxh3_r32(s + 4)) + seed));
        h.high = xxh3_avalanche_xxh64(high ^ ((uint64_t)(xxh3_r32(s + 8) ^ xxh3_r32(s + 12)) - seed));
        return h;
    }
    h.low = xxh3_avalanche_xxh64(seed ^ xxh3_r64(s + 64) ^ xxh3_r64(s + 72));
    h.high = xxh3_avalanche_xxh64(seed ^ xxh3_r64(s + 80) ^ xxh3_r64(s + 88));
    return h;
}

static inline void xxh3_mix32(xxh3_u128 *acc, const uint8_t *a, const uint8_t *b, const uint8_t *secret,
                              uint64_t seed) {
    acc->low += xxh3_mix16(a, secret, seed);
    acc->low ^= xxh3_r64(b) + xxh3_r64(b + 8);
    acc->high += xxh3_mix16(b, secret + 16, seed);
    acc->high ^= xxh3_r64(a) + xxh3_r64(a + 8);
}

static inline xxh3_u128 xxh3_128_finish(xxh3_u128 acc, size_t len, uint64_t seed) {
    xxh3_u128 h;
    h.low = xxh3_avalanche(acc.low + acc.high);
    h.high = 0 - xxh3_avalanche(acc.low * XXH3_P64_1 + acc.high * XXH3_P64_4 + ((uint64_t)len - seed) * XXH3_P64_2);
    return h;
}

static inline xxh3_u128 xxh3_128_to128(const uint8_t *in, size_t len, uint64_t seed) {
    xxh3_u128 acc = {len * XXH3_P64_1, 0};
    for (size_t i = (len - 1) / 32 + 1; i-- > 0;)
        xxh3_mix32(&acc, in + 16 * i, in + len - 16 * (i + 1), xxh3_secret + 32 * i, seed);
    return xxh3_128_finish(acc, len, seed);
}

static inline xxh3_u128 xxh3_128_to240(const uint8_t *in, size_t len, uint64_t seed) {
    xxh3_u128 acc = {len * XXH3_P64_1, 0};
    for (size_t i = 0; i < 4; i++) xxh3_mix32(&acc, in + 32 * i, in + 32 * i + 16, xxh3_secret + 32 * i, seed);
    acc.low = xxh3_avalanche(acc.low);
    acc.high = xxh3_avalanche(acc.high);
    for (size_t i = 4; i < len / 32; i++)
        xxh3_mix32(&acc, in + 32 * i, in + 32 * i + 16, xxh3_secret + 3 + 32 * (i - 4), seed);
    xxh3_mix32(&acc, in + len - 16, in + len - 32, xxh3_secret + 136 - 17 - 16, 0 - seed);
    return xxh3_128_finish(acc, len, seed);
}

/* ---- the long loop, one set of functions for each variant ----
 * stripes: accumulates n <= 16 stripes. blocks: n whole blocks, each followed by a scramble. copy: the same, and copies
 * as many bytes from in + shift to out, which begins a cache line; stream: past the caches. */

typedef struct {
    const char *name;
    void (*stripes)(uint64_t *acc, const uint8_t *in, size_t n, const uint8_t *secret);
    void (*blocks)(uint64_t *acc, const uint8_t *in, size_t n, const uint8_t *secret);
    void (*copy)(uint64_t *acc, const uint8_t *in, size_t n, const uint8_t *secret, uint8_t *out, size_t shift,
                 int stream);
} xxh3_variant;

static inline void xxh3_scramble_scalar(uint64_t *acc, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) acc[i] = (acc[i] ^ (acc[i] >> 47) ^ xxh3_r64(secret + 128 + 8 * i)) * XXH3_P32_1;
}

static void xxh3_stripes_scalar(uint64_t *acc, const uint8_t *in, size_t n, const uint8_t *secret) {
    for (size_t k = 0; k < n; k++, in += XXH3_STRIPE)
        for (int i = 0; i < 8; i++) {
            uint64_t data = xxh3_r64(in + 8 * i), keyed = data ^ xxh3_r64(secret + 8 * k + 8 * i);
            acc[i ^ 1] += data;
            acc[i] += (uint64_t)(uint32_t)keyed * (keyed >> 32);
        }
}

static void xxh3_blocks_scalar(uint64_t *acc, const uint8_t *in, size_t n, const uint8_t *secret) {
    for (; n > 0; n--, in += XXH3_BLOCK) {
        xxh3_stripes_scalar(acc, in, XXH3_BLOCK_STRIPES, secret);
        xxh3_scramble_scalar(acc, secret);
    }
}

static void xxh3_copy_scalar(uint64_t *acc, const uint8_t *in, size_t n, const uint8_t *secret, uint8_t *out,
                             size_t shift, int stream) {
    (void)stream;
    for (; n > 0; n--, in += XXH3_BLOCK, out += XXH3_BLOCK) {
        xxh3_blocks_scalar(acc, in, 1, secret);
        memcpy(out, in + shift, XXH3_BLOCK);
    }
}

#ifdef XXH3_X86

/* How far ahead of a copy memory is read: the hardware prefetcher stops at every page. */
#define XXH3_COPY_AHEAD 1024

/* Keeps a value in its register. Otherwise GCC would load it a second time as an instruction's memory operand, which
 * costs an eighth of the speed (measured). */
#define XXH3_KEEP(v) __asm__("" : "+v"(v))

/* One vector variant: registers of type V together hold the eight lanes. A template by macro because the target
 * attribute must stand on every function that is to be inlined into another. The stripe loop stays rolled: unrolled,
 * GCC 12 hoists the sixteen keys and spills them, at half the speed (measured). */
#define XXH3_VECTOR_VARIANT(NAME, TARGET, V, LOADU, STOREU, STREAM, XOR, ADD, MUL, SHR, SHUFFLE32, SET1)               \
    enum { xxh3_lanes_##NAME = XXH3_STRIPE / sizeof(V) };                                                              \
    __attribute__((target(TARGET), always_inline)) static inline void xxh3_stripe_##NAME(                              \
        V *acc, const uint8_t *in, const uint8_t *secret) {                                                            \
        for (int i = 0; i < xxh3_lanes_##NAME; i++) {                                                                  \
            V data = LOADU((const void *)(in + i * sizeof(V)));                                                        \
            XXH3_KEEP(data);                                                                                           \
            V keyed = XOR(data, LOADU((const void *)(secret + i * sizeof(V))));                                        \
            acc[i] = ADD(acc[i], ADD(MUL(keyed, SHR(keyed, 32)), SHUFFLE32(data, 0x4E)));                              \
        }                                                                                                              \
    }                                                                                                                  \
    __attribute__((target(TARGET), always_inline)) static inline void xxh3_scramble_##NAME(V *acc,                     \
                                                                                           const uint8_t *secret) {    \
        const V prime = SET1(XXH3_P32_1);                                                                              \
        for (int i = 0; i < xxh3_lanes_##NAME; i++) {                                                                  \
            V keyed = XOR(XOR(acc[i], SHR(acc[i], 47)), LOADU((const void *)(secret + 128 + i * sizeof(V))));          \
            V high = MUL(SHR(keyed, 32), prime);                                                                       \
            acc[i] = ADD(MUL(keyed, prime), XXH3_SHL32_##NAME(high));                                                  \
        }                                                                                                              \
    }                                                                                                                  \
    __attribute__((target(TARGET))) static void xxh3_blocks_##NAME(uint64_t *state, const uint8_t *in, size_t n,       \
                                                                   const uint8_t *secret) {                            \
        V acc[xxh3_lanes_##NAME];                                                                                      \
        for (int i = 0; i < xxh3_lanes_##NAME; i++) acc[i] = LOADU((const void *)((uint8_t *)state + i * sizeof(V)));  \
        for (; n > 0; n--, in += XXH3_BLOCK) {                                                                         \
            _Pragma("GCC unroll 1") for (int k = 0; k < XXH3_BLOCK_STRIPES; k++) {                                     \
                __builtin_prefetch(in + k * XXH3_STRIPE + 512, 0, 3);                                                  \
                xxh3_stripe_##NAME(acc, in + k * XXH3_STRIPE, secret + 8 * k);                                         \
            }                                                                                                          \
            xxh3_scramble_##NAME(acc, secret);                                                                         \
        }                                                                                                              \
        for (int i = 0; i < xxh3_lanes_##NAME; i++) STOREU((void *)((uint8_t *)state + i * sizeof(V)), acc[i]);        \
    }                                                                                                                  \
    __attribute__((target(TARGET), always_inline)) static inline void xxh3_copying_##NAME(                             \
        uint64_t *state, const uint8_t *in, size_t n, const uint8_t *secret, uint8_t *out, size_t shift, int stream) { \
        V acc[xxh3_lanes_##NAME];                                                                                      \
        for (int i = 0; i < xxh3_lanes_##NAME; i++) acc[i] = LOADU((const void *)((uint8_t *)state + i * sizeof(V)));  \
        for (; n > 0; n--, in += XXH3_BLOCK) {                                                                         \
            _Pragma("GCC unroll 1") for (int k = 0; k < XXH3_BLOCK_STRIPES; k++, out += XXH3_STRIPE) {                 \
                const uint8_t *stripe = in + k * XXH3_STRIPE;                                                          \
                __builtin_prefetch(stripe + XXH3_COPY_AHEAD, 0, 3);                                                    \
                xxh3_stripe_##NAME(acc, stripe, secret + 8 * k);                                                       \
                for (int i = 0; i < xxh3_lanes_##NAME; i++) {                                                          \
                    V data = LOADU((const void *)(stripe + shift + i * sizeof(V)));                                    \
                    if (stream) STREAM((void *)(out + i * sizeof(V)), data);                                           \
                    else STOREU((void *)(out + i * sizeof(V)), data);                                                  \
                }                                                                                                      \
            }                                                                                                          \
            xxh3_scramble_##NAME(acc, secret);                                                                         \
        }                                                                                                              \
        for (int i = 0; i < xxh3_lanes_##NAME; i++) STOREU((void *)((uint8_t *)state + i * sizeof(V)), acc[i]);        \
    }                                                                                                                  \
    __attribute__((target(TARGET))) static void xxh3_copy_##NAME(uint64_t *state, const uint8_t *in, size_t n,         \
                                                                 const uint8_t *secret, uint8_t *out, size_t shift,    \
                                                                 int stream) {                                         \
        if (stream) xxh3_copying_##NAME(state, in, n, secret, out, shift, 1);                                          \
        else xxh3_copying_##NAME(state, in, n, secret, out, shift, 0);                                                 \
    }                                                                                                                  \
    __attribute__((target(TARGET))) static void xxh3_stripes_##NAME(uint64_t *state, const uint8_t *in, size_t n,      \
                                                                    const uint8_t *secret) {                           \
        V acc[xxh3_lanes_##NAME];                                                                                      \
        for (int i = 0; i < xxh3_lanes_##NAME; i++) acc[i] = LOADU((const void *)((uint8_t *)state + i * sizeof(V)));  \
        for (size_t k = 0; k < n; k++) xxh3_stripe_##NAME(acc, in + k * XXH3_STRIPE, secret + 8 * k);                  \
        for (int i = 0; i < xxh3_lanes_##NAME; i++) STOREU((void *)((uint8_t *)state + i * sizeof(V)), acc[i]);        \
    }

#define XXH3_SHL32_sse2(v) _mm_slli_epi64(v, 32)
#define XXH3_SHL32_avx2(v) _mm256_slli_epi64(v, 32)
#define XXH3_SHL32_avx512(v) _mm512_slli_epi64(v, 32)
#define XXH3_SHUFFLE512(v, order) _mm512_shuffle_epi32(v, (_MM_PERM_ENUM)(order))
#define XXH3_STREAM512(to, v) _mm512_stream_si512((__m512i *)(to), v)

XXH3_VECTOR_VARIANT(sse2, "sse2", __m128i, _mm_loadu_si128, _mm_storeu_si128, _mm_stream_si128, _mm_xor_si128,
                    _mm_add_epi64, _mm_mul_epu32, _mm_srli_epi64, _mm_shuffle_epi32, _mm_set1_epi64x)
XXH3_VECTOR_VARIANT(avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256,
                    _mm256_xor_si256, _mm256_add_epi64, _mm256_mul_epu32, _mm256_srli_epi64, _mm256_shuffle_epi32,
                    _mm256_set1_epi64x)
XXH3_VECTOR_VARIANT(avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_storeu_si512, XXH3_STREAM512,
                    _mm512_xor_si512, _mm512_add_epi64, _mm512_mul_epu32, _mm512_srli_epi64, XXH3_SHUFFLE512,
                    _mm512_set1_epi64)
#endif

/* Fills table with the variants that this CPU can run, slowest first, and returns their number (1 to 4). */
static int xxh3_variants(xxh3_variant table[4]) {
    int n = 0;
    xxh3_variant scalar = {"scalar", xxh3_stripes_scalar, xxh3_blocks_scalar, xxh3_copy_scalar};
    table[n++] = scalar;
#ifdef XXH3_X86
    xxh3_variant sse2 = {"sse2", xxh3_stripes_sse2, xxh3_blocks_sse2, xxh3_copy_sse2};
    xxh3_variant avx2 = {"avx2", xxh3_stripes_avx2, xxh3_blocks_avx2, xxh3_copy_avx2};
    xxh3_variant avx512 = {"avx512", xxh3_stripes_avx512, xxh3_blocks_avx512, xxh3_copy_avx512};
    __builtin_cpu_init();
    table[n++] = sse2;
    if (__builtin_cpu_supports("avx2")) table[n++] = avx2;
    if (__builtin_cpu_supports("avx512f")) table[n++] = avx512;
#endif
    return n;
}

/* ---- above 240 bytes ---- */

static inline void xxh3_start(uint64_t acc[8]) {
    static const uint64_t start[8] = {XXH3_P32_3, XXH3_P64_1, XXH3_P64_2, XXH3_P64_3,
                                      XXH3_P64_4, XXH3_P32_2, XXH3_P64_5, XXH3_P32_1};
    memcpy(acc, start, sizeof start);
}

static inline uint64_t xxh3_merge(const uint64_t acc[8], const uint8_t *secret, uint64_t h) {
    for (int i = 0; i < 4; i++)
        h += xxh3_fold(acc[2 * i] ^ xxh3_r64(secret + 16 * i), acc[2 * i + 1] ^ xxh3_r64(secret + 16 * i + 8));
    return xxh3_avalanche(h);
}

/* A seed replaces the secret by one derived from it; seed 0 derives the secret itself. */
static inline const uint8_t *xxh3_derive(uint8_t derived[XXH3_SECRET_BYTES], uint64_t seed) {
    if (seed == 0) return xxh3_secret;
    for (int i = 0; i < XXH3_SECRET_BYTES; i += 16) {
        xxh3_w64(derived + i, xxh3_r64(xxh3_secret + i) + seed);
        xxh3_w64(derived + i + 8, xxh3_r64(xxh3_secret + i + 8) - seed);
    }
    return derived;
}

/* The bytes after the whole blocks: the remaining stripes, then the last 64 bytes once more. */
static inline void xxh3_tail(uint64_t acc[8], const uint8_t *in, size_t len, const uint8_t *secret,
                             const xxh3_variant *v) {
    size_t done = (len - 1) / XXH3_BLOCK * XXH3_BLOCK;
    v->stripes(acc, in + done, (len - 1 - done) / XXH3_STRIPE, secret);
    v->stripes(acc, in + len - XXH3_STRIPE, 1, secret + XXH3_SECRET_BYTES - XXH3_STRIPE - 7);
}

static inline void xxh3_long(uint64_t acc[8], const uint8_t *in, size_t len, const uint8_t *secret,
                             const xxh3_variant *v) {
    xxh3_start(acc);
    v->blocks(acc, in, (len - 1) / XXH3_BLOCK, secret);
    xxh3_tail(acc, in, len, secret, v);
}

/* ---- entry points: pure, thread-safe ---- */

static inline uint64_t xxh3_64(const uint8_t *in, size_t len, uint64_t seed, const xxh3_variant *v) {
    if (len <= 16) return xxh3_64_to16(in, len, seed);
    if (len <= 128) return xxh3_64_to128(in, len, seed);
    if (len <= 240) return xxh3_64_to240(in, len, seed);
    uint64_t acc[8] __attribute__((aligned(64)));
    uint8_t derived[XXH3_SECRET_BYTES] __attribute__((aligned(64)));
    const uint8_t *secret = xxh3_derive(derived, seed);
    xxh3_long(acc, in, len, secret, v);
    return xxh3_merge(acc, secret + 11, len * XXH3_P64_1);
}

static inline xxh3_u128 xxh3_128(const uint8_t *in, size_t len, uint64_t seed, const xxh3_variant *v) {
    if (len <= 16) return xxh3_128_to16(in, len, seed);
    if (len <= 128) return xxh3_128_to128(in, len, seed);
    if (len <= 240) return xxh3_128_to240(in, len, seed);
    uint64_t acc[8] __attribute__((aligned(64)));
    uint8_t derived[XXH3_SECRET_BYTES] __attribute__((aligned(64)));
    const uint8_t *secret = xxh3_derive(derived, seed);
    xxh3_long(acc, in, len, secret, v);
    xxh3_u128 h;
    h.low = xxh3_merge(acc, secret + 11, len * XXH3_P64_1);
    h.high = xxh3_merge(acc, secret + XXH3_SECRET_BYTES - XXH3_STRIPE - 11, ~(len * XXH3_P64_2));
    return h;
}

#endif
