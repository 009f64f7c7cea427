/* A board: memory that all ranks map, a row a rank (see holdfast/comms/algorithms/board.py, which says what is where).
 *
 * Flags are written by their owner with release, and read with acquire. A rank that is about to sleep says so before it
 * looks one last time, and a rank that raises a flag looks for sleepers afterwards, each with a full fence between, so
 * that no wake-up is lost. */

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

enum { FLAG = 0, GIVEN = 1, REDUCED = 2, TAKEN = 3, ASLEEP = 8, DOORBELL = 16, TABLE = 32 };
#define INLINED ((uint64_t)1 << 63)

typedef struct {
    char *base;
    size_t nbytes;
    int rank, size;
    uint64_t row, table, slots, slot, stage, block; /* bytes; table, slots and stage from the start of a row */
    int depth;                                      /* blocks a rank may be ahead of another in a staged op */
    long spins, yields;                             /* looks of a wait before it gives way, and after */
    atomic_int stopped;
    _Atomic uint64_t restful; /* waits for less than this do not give way */
} board;

typedef _Atomic uint64_t word;

static inline word *word_of(const board *b, int rank, int number) {
    return (word *)(b->base + (uint64_t)rank * b->row + 8 * (uint64_t)number);
}

static inline uint64_t flag_of(const board *b, int rank, int flag) {
    return atomic_load_explicit(word_of(b, rank, flag), memory_order_acquire);
}

static inline uint64_t *table_of(const board *b, int rank, uint64_t op) {
    return (uint64_t *)(b->base + (uint64_t)rank * b->row + 8 * TABLE + (op & 1) * b->table);
}

static inline char *slot_of(const board *b, int rank, uint64_t op) {
    return b->base + (uint64_t)rank * b->row + b->slots + (op & 1) * b->slot;
}

/* Where `src` stages a block of its input for `dst`, or, for itself, one that is for all. */
static inline char *staged(const board *b, int src, int dst, uint64_t step) {
    uint64_t place = (uint64_t)b->depth * (uint64_t)dst + step % (uint64_t)b->depth;
    return b->base + (uint64_t)src * b->row + b->stage + place * b->block;
}

static inline void ring(board *b, int rank) {
    word *bell = word_of(b, rank, DOORBELL);
    atomic_store_explicit(bell, (atomic_load_explicit(bell, memory_order_relaxed) + 1) & 0xffffffffu, memory_order_release);
    syscall(SYS_futex, bell, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

static inline void wake_sleepers(board *b) {
    atomic_thread_fence(memory_order_seq_cst);
    for (int rank = 0; rank < b->size; rank++)
        if (rank != b->rank && flag_of(b, rank, ASLEEP))
            ring(b, rank);
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

/* Look until `rank` (-1: every other rank) has raised a flag to `value`, then give way between looks. Returns the rank
 * that has not: -1 if all have. Gives up early once the board is stopped, or where the caller is to sleep at once. */
static inline int look(const board *b, int rank, int flag, uint64_t value, long spins, long yields) {
    int at = rank < 0 ? 0 : rank, end = rank < 0 ? b->size : rank + 1;
    for (long turn = 0;; turn++) {
        while (at < end && (at == b->rank || flag_of(b, at, flag) >= value))
            at++;
        if (at == end)
            return -1;
        if (turn >= spins + yields || atomic_load_explicit(&b->stopped, memory_order_relaxed))
            return at;
        if (turn < spins)
            relax();
        else if (value < atomic_load_explicit(&b->restful, memory_order_relaxed))
            return at;
        else
            sched_yield();
    }
}

#endif
