/* A board: memory that all ranks map, one row a rank. The layout is in
 * comms/algorithms/shared_memory/board.py.
 *
 * Each rank writes its own flags with release; the others read them with acquire. To lose no wake-up, a rank
 * sets ASLEEP before its last check of the flags, and a rank that raises a flag checks ASLEEP afterwards; a
 * full fence stands between the two steps on both sides. */

#ifndef HOLDFAST_BOARD_H
#define HOLDFAST_BOARD_H

#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { FLAG = 0, GIVEN = 1, REDUCED = 2, TAKEN = 3, NEAR = 4, IN_PLACE_BITS = 5, UNSTAGED = 6 };
enum { ASLEEP = 8, FUTEX = 16, STATE = 24, EPOCH = 26, PROBE = 128, LINES = 256, TABLE = 384 };
enum {
    RUN_AHEAD = 16
}; /* tiny ops that a rank may be ahead of another: each has a line and a table of its own */
enum { ABORTED = 2 }; /* a rank in this state, or a higher one, ends the waits of the others */
enum { PUBLISHED = -1, PUBLISHED_ON_LINE = -2 }; /* given instead of a flag; the value is then an op number */

enum {
    SLEEP_NANOSECONDS = 2000000
}; /* nanoseconds of one sleep; after it the rank checks its deadline and its peers */

typedef struct {
    char *at;
    uint64_t nbytes;
} span;

typedef struct {
    uint64_t current,
        previous; /* nanoseconds of the slowest probe: in this op, in the last one that published it */
} read_latency;

typedef struct {
    char *base;
    size_t nbytes;
    int rank, size;
    uint64_t ready; /* value of EPOCH in a row that is ready for this board */
    uint64_t row, table, places, slots, slot, stage,
        block;             /* bytes; places, slots, stage: from the start of a row */
    const int32_t *pids;   /* process id of each rank; NULL: the kernel may not read their memory */
    int depth;             /* blocks that a rank may be ahead of another in a staged op */
    long spins, yields;    /* checks of a wait before it yields the processor, and after */
    uint32_t futex_value;  /* value of the futex word in `prepare_wait` */
    uint64_t all_finished; /* the newest op that all ranks are known to have finished */
    atomic_int stopped;
    _Atomic uint64_t no_yield_below; /* waits for smaller values do not yield */
    read_latency latency;
} board;

static inline int overlap(span a, span b) { return a.at < b.at + b.nbytes && b.at < a.at + a.nbytes; }

typedef _Atomic uint64_t word;

static inline word *word_of(const board *b, int rank, int number) {
    return (word *)(b->base + (uint64_t)rank * b->row + 8 * (uint64_t)number);
}

static inline uint64_t flag_of(const board *b, int rank, int flag) {
    return atomic_load_explicit(word_of(b, rank, flag), memory_order_acquire);
}

/* The stage block of `src` for `dst`; with `dst` = `src`, the block for all ranks. */
static inline char *staged(const board *b, int src, int dst, uint64_t step) {
    uint64_t place = (uint64_t)b->depth * (uint64_t)dst + step % (uint64_t)b->depth;
    return b->base + (uint64_t)src * b->row + b->stage + place * b->block;
}

/* All ranks sleep on one futex word, so one system call wakes any number of them. With one call each, the
 * first rank woken could preempt the waker before it wakes the others. */
static inline word *futex_of(const board *b) { return word_of(b, 0, FUTEX); }

static inline uint32_t bit_of(int rank) { return (uint32_t)1 << (rank & 31); }

/* Wake the ranks with these bits, if they sleep. */
static inline void futex_wake(board *b, uint32_t ranks) {
    atomic_fetch_add_explicit(futex_of(b), 1, memory_order_release);
    syscall(SYS_futex, futex_of(b), FUTEX_WAKE_BITSET, 1 << 30, NULL, NULL, ranks);
}

static inline void wake_sleepers(board *b) {
    uint32_t asleep = 0;
    atomic_thread_fence(memory_order_seq_cst);
    for (int rank = 0; rank < b->size; rank++)
        if (rank != b->rank && flag_of(b, rank, ASLEEP))
            asleep |= bit_of(rank);
    if (asleep)
        futex_wake(b, asleep);
}

static inline void raise_flag(board *b, int flag, uint64_t value) {
    atomic_store_explicit(word_of(b, b->rank, flag), value, memory_order_release);
    wake_sleepers(b);
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The line on which `rank` publishes a tiny op. Its first word is the op number. */
static inline word *line_at(const board *b, int rank, uint64_t op) {
    return word_of(b, rank, LINES + 8 * (int)(op % RUN_AHEAD));
}

static inline int published_on_line(const board *b, int rank, uint64_t op) {
    return atomic_load_explicit(line_at(b, rank, op), memory_order_acquire) == op;
}

static inline int published(const board *b, int rank, uint64_t op) {
    return published_on_line(b, rank, op) || flag_of(b, rank, FLAG) >= 4 * op + 1;
}

/* Whether `rank` has raised `flag` to `value`, or published op `value`. PUBLISHED_ON_LINE also reads the
 * flag, on another cache line, once in 16 turns: a rank that publishes a different op may raise only its
 * flag. */
static inline int has_reached(const board *b, int rank, int flag, uint64_t value, long turn) {
    switch (flag) {
    case PUBLISHED:
        return published(b, rank, value);
    case PUBLISHED_ON_LINE:
        return turn % 16 == 15 ? published(b, rank, value) : published_on_line(b, rank, value);
    default:
        return flag_of(b, rank, flag) >= value;
    }
}

static inline uint64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Wait by polling until `rank` (-1: every other rank) has reached `value`: first spin, then yield between
 * checks. Returns a rank that has not, or -1. Returns early once the board is stopped, or instead of yielding
 * if `phase` is below `no_yield_below`. A yield takes as long as other processes compute: on a busy machine
 * yields end with the time of one sleep, and the caller then looks whether that rank is still there. */
static inline int spin_wait(const board *b, int rank, int flag, uint64_t value, long spins, long yields) {
    int at = rank < 0 ? 0 : rank, end = rank < 0 ? b->size : rank + 1;
    uint64_t phase = flag < 0 ? 4 * value + 1 : value, until = 0;
    for (long turn = 0;; turn++) {
        while (at < end && (at == b->rank || has_reached(b, at, flag, value, turn)))
            at++;
        if (at == end)
            return -1;
        if (turn >= spins + yields || atomic_load_explicit(&b->stopped, memory_order_relaxed))
            return at;
        if (turn < spins)
            relax();
        else if (phase < atomic_load_explicit(&b->no_yield_below, memory_order_relaxed))
            return at;
        else if (!until)
            until = nanoseconds() + SLEEP_NANOSECONDS;
        else if (nanoseconds() < until)
            sched_yield();
        else
            return at;
    }
}

/* Whether another rank has aborted, so that no more ops can complete here. EPOCH is read first: until a row
 * is ready, its STATE is of an earlier epoch. The fence keeps reads of a rank's memory before the look at its
 * state. */
static inline int is_over(const board *b) {
    atomic_thread_fence(memory_order_acquire);
    for (int rank = 0; rank < b->size; rank++)
        if (rank != b->rank && flag_of(b, rank, EPOCH) == b->ready && flag_of(b, rank, STATE) >= ABORTED)
            return 1;
    return 0;
}

/* Whether all other ranks have `bits` set in word `number` of their rows. */
static inline int all_have_bits(const board *b, int number, uint64_t bits) {
    for (int rank = 0; rank < b->size; rank++)
        if (rank != b->rank && (flag_of(b, rank, number) & bits) != bits)
            return 0;
    return 1;
}

static inline void prepare_wait(board *b) {
    atomic_store_explicit(word_of(b, b->rank, ASLEEP), 1, memory_order_relaxed);
    b->futex_value = (uint32_t)atomic_load_explicit(futex_of(b), memory_order_acquire);
    atomic_thread_fence(memory_order_seq_cst);
}

/* Sleep until a rank wakes this one, unless one has since `prepare_wait`. */
static inline void futex_wait(board *b, uint64_t until) {
    struct timespec end = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)}; /* CLOCK_MONOTONIC */
    syscall(SYS_futex, futex_of(b), FUTEX_WAIT_BITSET, b->futex_value, &end, NULL, bit_of(b->rank));
}

static inline void finish_wait(board *b) {
    atomic_store_explicit(word_of(b, b->rank, ASLEEP), 0, memory_order_relaxed);
}

/* Sleep until `rank` (-1: every other rank) has reached `value`. Returns like `spin_wait`, after
 * SLEEP_NANOSECONDS at most, and as soon as the board is over. */
int sleep_wait(board *b, int rank, int flag, uint64_t value);

/* `memmove`, split into small pieces where one call is slow. On AMD's Zen 3 and 4, `rep movsb` (which glibc
 * uses from 2 KiB on) is 16 times slower if the target lies 1 to 15 bytes further into its page than the
 * source. */
void copy_bytes(void *to, const void *from, uint64_t nbytes);

/* Copy with stores that bypass the caches: into this rank's row, for a reader that may share no cache with
 * this core (see core_locality.h), or into an output that no cache holds. A rank that sees a flag raised
 * afterwards sees the data. The two must not overlap. */
void stream(char *to, const char *from, uint64_t nbytes);

#endif
