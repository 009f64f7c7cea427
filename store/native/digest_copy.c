#define PY_SSIZE_T_CLEAN
#include "digest_copy.h"
#include "module.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define STREAM_BYTES ((uint64_t)16 << 20) /* copies of more bytes than this leave the caches alone */
#define MOST_THREADS 256

/* A piece: its checksum goes to the job's place in `sums`. It is copied whole to `target` unless that is 0;
 * then `count` copies out of it, from number `first` on, are made. */
typedef struct {
    uint64_t source, nbytes, target, first, count;
} digest_job;

/* Rows of equal length between two memories. */
typedef struct {
    uint64_t source, target, rows, row_bytes, source_stride, target_stride;
} row_copy;

static const uint8_t xxh3_secret[192] __attribute__((aligned(64))) = {
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

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define STRIPE 64
#define STRIPES_OF_BLOCK 16

static const uint64_t xxh3_start[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                       PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

static inline uint64_t read64(const void *from) {
    uint64_t value;
    memcpy(&value, from, 8);
    return value;
}

static inline uint64_t multiply_and_fold(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t xxh3_finish(const uint64_t *lanes, uint64_t nbytes) {
    uint64_t sum = nbytes * PRIME64_1;
    for (int i = 0; i < 4; i++)
        sum += multiply_and_fold(lanes[2 * i] ^ read64(xxh3_secret + 11 + 16 * i),
                                 lanes[2 * i + 1] ^ read64(xxh3_secret + 19 + 16 * i));
    sum ^= sum >> 37;
    sum *= 0x165667919E3779F9ULL;
    return sum ^ (sum >> 32);
}

/* -- portable */

static inline void mix_stripe(uint64_t *lanes, const uint8_t *data, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        uint64_t value = read64(data + 8 * i), key = value ^ read64(secret + 8 * i);
        lanes[i ^ 1] += value;
        lanes[i] += (key & 0xffffffffU) * (key >> 32);
    }
}

static uint64_t digest_copy_portable(const uint8_t *source, uint8_t *target, uint64_t nbytes, int stream) {
    (void)stream;
    uint64_t lanes[8], stripes = (nbytes - 1) / STRIPE;
    memcpy(lanes, xxh3_start, sizeof lanes);
    for (uint64_t done = 0; done < stripes; done++) {
        const uint8_t *data = source + done * STRIPE;
        uint64_t place = done % STRIPES_OF_BLOCK;
        if (target)
            memcpy(target + done * STRIPE, data, STRIPE);
        mix_stripe(lanes, data, xxh3_secret + 8 * place);
        if (place == STRIPES_OF_BLOCK - 1)
            for (int i = 0; i < 8; i++)
                lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ read64(xxh3_secret + 128 + 8 * i)) * PRIME32_1;
    }
    if (target)
        memcpy(target + stripes * STRIPE, source + stripes * STRIPE, nbytes - stripes * STRIPE);
    mix_stripe(lanes, source + nbytes - STRIPE, xxh3_secret + 121);
    return xxh3_finish(lanes, nbytes);
}

/* -- AVX2 */

#if defined(__x86_64__)
#define LOAD(address) _mm256_loadu_si256((const __m256i *)(address))

__attribute__((target("avx2"))) static inline __m256i mix_half(__m256i lanes, __m256i data,
                                                               const uint8_t *secret) {
    __m256i key = _mm256_xor_si256(data, LOAD(secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    return _mm256_add_epi64(product, _mm256_add_epi64(lanes, _mm256_shuffle_epi32(data, 0x4e)));
}

__attribute__((target("avx2"))) static inline __m256i scramble_half(__m256i lanes, const uint8_t *secret) {
    const __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    __m256i key = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)), LOAD(secret));
    __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(key, 32), prime), 32);
    return _mm256_add_epi64(_mm256_mul_epu32(key, prime), high);
}

__attribute__((target("avx2"))) static uint64_t digest_copy_avx2(const uint8_t *source, uint8_t *target,
                                                                 uint64_t nbytes, int stream) {
    __m256i low = LOAD(xxh3_start), high = LOAD(xxh3_start + 4);
    uint64_t stripes = (nbytes - 1) / STRIPE, lanes[8];
    const uint8_t *data = source;
    uint8_t *into = target;
    stream = stream && (uintptr_t)target % 32 == 0;
    for (uint64_t done = 0; done < stripes;) {
        uint64_t left = stripes - done, now = left < STRIPES_OF_BLOCK ? left : STRIPES_OF_BLOCK;
        for (uint64_t i = 0; i < now; i++, data += STRIPE) {
            _mm_prefetch((const char *)data + 1024, _MM_HINT_T0);
            __m256i a = LOAD(data), b = LOAD(data + 32);
            if (into && stream) {
                _mm256_stream_si256((__m256i *)into, a);
                _mm256_stream_si256((__m256i *)(into + 32), b);
                into += STRIPE;
            } else if (into) {
                _mm256_storeu_si256((__m256i *)into, a);
                _mm256_storeu_si256((__m256i *)(into + 32), b);
                into += STRIPE;
            }
            low = mix_half(low, a, xxh3_secret + 8 * i);
            high = mix_half(high, b, xxh3_secret + 8 * i + 32);
        }
        done += now;
        if (now == STRIPES_OF_BLOCK) {
            low = scramble_half(low, xxh3_secret + 128);
            high = scramble_half(high, xxh3_secret + 160);
        }
    }
    if (into)
        memcpy(into, data, nbytes - stripes * STRIPE);
    _mm_sfence();
    low = mix_half(low, LOAD(source + nbytes - STRIPE), xxh3_secret + 121);
    high = mix_half(high, LOAD(source + nbytes - 32), xxh3_secret + 153);
    _mm256_storeu_si256((__m256i *)lanes, low);
    _mm256_storeu_si256((__m256i *)(lanes + 4), high);
    return xxh3_finish(lanes, nbytes);
}
#undef LOAD
#endif

uint64_t digest_copy_piece(const uint8_t *source, uint8_t *target, uint64_t nbytes, int stream) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        return digest_copy_avx2(source, target, nbytes, stream);
#endif
    return digest_copy_portable(source, target, nbytes, stream);
}

/* -- many pieces */

typedef struct {
    const digest_job *jobs;
    const row_copy *copies;
    uint64_t *sums;
    uint64_t count;
    int stream;
    _Atomic uint64_t next;
} digest_work;

static void run_digest_job(const digest_work *work, uint64_t number) {
    const digest_job *job = &work->jobs[number];
    const uint8_t *source = (const uint8_t *)(uintptr_t)job->source;
    uint8_t *target = (uint8_t *)(uintptr_t)job->target;
    if (job->nbytes >= DIGEST_LEAST)
        work->sums[number] = digest_copy_piece(source, target, job->nbytes, work->stream);
    else if (target)
        memcpy(target, source, job->nbytes);
    for (uint64_t i = job->first; i < job->first + job->count; i++) {
        row_copy copy = work->copies[i];
        for (; copy.rows; copy.rows--, copy.source += copy.source_stride, copy.target += copy.target_stride)
            memcpy((void *)(uintptr_t)copy.target, (const void *)(uintptr_t)copy.source, copy.row_bytes);
    }
}

static void *run_digest_jobs(void *given) {
    digest_work *work = given;
    uint64_t number;
    while ((number = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed)) < work->count)
        run_digest_job(work, number);
    return NULL;
}

/* Do all jobs, with up to `threads` threads, the calling one among them. Pieces of fewer than DIGEST_LEAST
 * bytes get no checksum. */
static void digest_copy_all(digest_work *work, uint64_t threads) {
    pthread_t started[MOST_THREADS];
    uint64_t helpers = 0;
    while (helpers + 1 < threads && helpers < MOST_THREADS && helpers + 1 < work->count &&
           pthread_create(&started[helpers], NULL, run_digest_jobs, work) == 0)
        helpers++;
    run_digest_jobs(work);
    while (helpers)
        pthread_join(started[--helpers], NULL);
}

/* -- a function of Python */

/* digest_copies(jobs, count, copies, sums, threads): all but `count` and `threads` are addresses. */
PyObject *digest_copies(PyObject *module, PyObject *const *args, Py_ssize_t number) {
    (void)module;
    uint64_t a[5], nbytes = 0;
    if (!parse_numbers(args, number, 5, a) || !is_memory(a[0], a[1]) || !is_memory(a[3], a[1]))
        return NULL;
    digest_work work = {(const digest_job *)(uintptr_t)a[0],
                        (const row_copy *)(uintptr_t)a[2],
                        (uint64_t *)(uintptr_t)a[3],
                        a[1],
                        0,
                        0};
    for (uint64_t i = 0; i < work.count; i++)
        nbytes += work.jobs[i].nbytes;
    work.stream = nbytes >= STREAM_BYTES;
    Py_BEGIN_ALLOW_THREADS;
    digest_copy_all(&work, a[4]);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}
