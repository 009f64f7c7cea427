/* Copies into a stage: past the caches, or through them, as is found to be faster here and now.
 *
 * Where whoever takes a block out shares a cache with whoever staged it, it had better stay there. Where they do not, a
 * line that is dirty in the one's cache costs the other five times what one from memory does, and the first as much when
 * it is written again. Which of the two it is may change from minute to minute on a machine that is itself a guest. So
 * one block in a while is staged the other way, every rank says in its row what blocks of either kind take it to copy
 * out, and who stages adds what they take it to stage. */

#ifndef HOLDFAST_STAGING_H
#define HOLDFAST_STAGING_H

#include "board.h"

#ifdef __SSE2__
#include <emmintrin.h>
#include <x86intrin.h>
static inline uint64_t ticks(void) { return __rdtsc(); }
#else
static inline uint64_t ticks(void) { return 0; }
#endif

enum { CACHED = 0, STREAMED = 1 };
enum { TRIED = 128 }; /* one block in so many is staged the other way */

/* Seen by all who see a flag that is raised afterwards. */
static void stream(char *to, const char *from, uint64_t nbytes) {
    uint64_t i = 0;
#ifdef __SSE2__
    if (!((uintptr_t)to & 15)) {
        for (; i + 64 <= nbytes; i += 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)(from + i)), b = _mm_loadu_si128((const __m128i *)(from + i + 16)),
                    c = _mm_loadu_si128((const __m128i *)(from + i + 32)),
                    d = _mm_loadu_si128((const __m128i *)(from + i + 48));
            _mm_stream_si128((__m128i *)(to + i), a);
            _mm_stream_si128((__m128i *)(to + i + 16), b);
            _mm_stream_si128((__m128i *)(to + i + 32), c);
            _mm_stream_si128((__m128i *)(to + i + 48), d);
        }
        _mm_sfence();
    }
#endif
    memcpy(to + i, from + i, nbytes - i);
}

/* How `rank` stages block `number`, counted over all ops: as it said before the op, but for those that are tried. */
static inline int how(const board *b, int rank, uint64_t number) {
    return (int)(flag_of(b, rank, HOW) & 1) ^ (number % TRIED == 3);
}

/* Take into account that `nbytes` took so long, a sixteenth of it: of interruptions little. */
static inline void learn(word *cost, uint64_t began, uint64_t nbytes) {
    uint64_t seen = ((ticks() - began) << 10) / nbytes, known = atomic_load_explicit(cost, memory_order_relaxed);
    if (known && seen > 4 * known)
        seen = 4 * known;
    atomic_store_explicit(cost, known ? (15 * known + seen) / 16 : seen, memory_order_relaxed);
}

static void stage(board *b, char *to, const char *from, uint64_t nbytes, uint64_t number) {
    int way = how(b, b->rank, number);
    uint64_t began = ticks();
    if (way == STREAMED)
        stream(to, from, nbytes);
    else
        memcpy(to, from, nbytes);
    if (nbytes)
        learn(&b->staging[way], began, nbytes);
}

/* Copy a block of `rank` out of its stage. */
static void unstage(board *b, char *to, const char *from, uint64_t nbytes, int rank, uint64_t number) {
    uint64_t began = ticks();
    memcpy(to, from, nbytes);
    learn(word_of(b, b->rank, COPYING + how(b, rank, number)), began, nbytes);
}

/* Decide how this rank stages, for one op, and say so: the way that takes all less, if by a tenth. */
static void choose(board *b) {
    uint64_t cost[2] = {0, 0}, now = flag_of(b, b->rank, HOW) & 1;
    for (int way = CACHED; way <= STREAMED; way++) {
        uint64_t known = atomic_load_explicit(&b->staging[way], memory_order_relaxed);
        for (int rank = 0; rank < b->size && known; rank++) {
            uint64_t copying = rank == b->rank ? 1 : flag_of(b, rank, COPYING + way);
            known = copying ? known + copying : 0;
        }
        cost[way] = known;
    }
    if (!cost[CACHED] || !cost[STREAMED])
        now = STREAMED;
    else if (10 * cost[1 - now] < 9 * cost[now])
        now = 1 - now;
    atomic_store_explicit(word_of(b, b->rank, HOW), now, memory_order_release);
}

#endif
