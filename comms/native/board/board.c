#include "board/board.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

int sleep_wait(board *b, int rank, int flag, uint64_t value) {
    uint64_t until = nanoseconds() + SLEEP_NANOSECONDS;
    int missing;
    for (;;) {
        prepare_wait(b);
        missing = spin_wait(b, rank, flag == PUBLISHED_ON_LINE ? PUBLISHED : flag, value, 0, 0);
        if (missing < 0 || nanoseconds() >= until ||
            atomic_load_explicit(&b->stopped, memory_order_relaxed) || is_over(b))
            break;
        futex_wait(b, until);
    }
    finish_wait(b);
    return missing;
}

void copy_bytes(void *to, const void *from, uint64_t nbytes) {
    char *into = to;
    const char *at = from;
    uint64_t ahead = (uintptr_t)into - (uintptr_t)at, behind = (uintptr_t)at - (uintptr_t)into;
    if ((ahead & 4095) - 1 < 15 && ahead >= nbytes && behind >= nbytes)
        for (uint64_t piece = 1024; nbytes > piece; into += piece, at += piece, nbytes -= piece)
            memmove(into, at, piece);
    memmove(into, at, nbytes);
}

void stream(char *to, const char *from, uint64_t nbytes) {
    uint64_t i = 0;
#ifdef __SSE2__
    if (!((uintptr_t)to & 15)) {
        for (; i + 64 <= nbytes; i += 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)(from + i)),
                    b = _mm_loadu_si128((const __m128i *)(from + i + 16)),
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
    copy_bytes(to + i, from + i, nbytes - i);
}
