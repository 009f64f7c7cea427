/* Small ops: a rank publishes an op and its inputs in its row, and takes the inputs of the others from
 * theirs.
 *
 * An op uses one of two tables of a row: its signature, then the place and size of each input. Small inputs
 * lie in one of two slots. A single input of up to 40 bytes, or none, goes on one line instead, with the
 * signature and the op number: then only one cache line crosses between cores, which is most of what such an
 * op costs. The flag is raised as well, for ranks that read it. */

#ifndef HOLDFAST_PUBLICATION_H
#define HOLDFAST_PUBLICATION_H

#include "board/core_locality.h"
#include "kernels/reductions.h"

#define INLINED ((uint64_t)1 << 63)
enum { LINE_SIGNATURE = 1, LINE_NBYTES = 2, LINE_INPUT = 3, LINE_INPUT_BYTES = 40 };
#define STREAMED (1 << 14)                /* inputs of this size bypass the caches if ranks are far apart */
enum { TAKEN_ALL = -1, NOT_COPIED = -2 }; /* given instead of a rank */

static inline uint64_t *table_of(const board *b, int rank, uint64_t op) {
    return (uint64_t *)(b->base + (uint64_t)rank * b->row + 8 * TABLE + (op % RUN_AHEAD) * b->table);
}

static inline char *slot_of(const board *b, int rank, uint64_t op) {
    return b->base + (uint64_t)rank * b->row + b->slots + (op & 1) * b->slot;
}

/* The line of `rank` if it holds this op, else NULL. */
static inline const uint64_t *line_of(const board *b, int rank, uint64_t op) {
    return published_on_line(b, rank, op) ? (const uint64_t *)line_at(b, rank, op) : NULL;
}

/* Whether `rank`, which has published an op, published the same one as this rank. */
static inline int has_same_op(const board *b, int rank, uint64_t op) {
    const uint64_t *line = line_of(b, rank, op);
    return (line ? line[LINE_SIGNATURE] : *table_of(b, rank, op)) == *table_of(b, b->rank, op);
}

/* Where input `index` of `rank` was copied to; NULL if it was not. */
static inline const char *input(const board *b, int rank, uint64_t op, uint64_t index, uint64_t *nbytes) {
    const uint64_t *line = index ? NULL : line_of(b, rank, op);
    if (line) {
        *nbytes = line[LINE_NBYTES];
        return *nbytes <= LINE_INPUT_BYTES ? (const char *)(line + LINE_INPUT) : NULL;
    }
    const uint64_t *entry = table_of(b, rank, op) + 1 + 2 * index;
    *nbytes = entry[1];
    uint64_t offset = entry[0] & ~INLINED;
    if (!(entry[0] & INLINED) || offset > b->nbytes || *nbytes > b->nbytes - offset)
        return NULL;
    return b->base + offset;
}

/* Call before an input of `rank` is read: probes the locality if it is large. */
static inline void probe_large_input(board *b, int rank, uint64_t nbytes) {
    if (nbytes >= STREAMED && rank != b->rank)
        probe_read(b, rank);
}

/* Whether these inputs, or none, go on a line. */
static inline int is_tiny(const span *inputs, int count) {
    return !count || (count == 1 && inputs->nbytes <= LINE_INPUT_BYTES);
}

/* Publish an op. 1 if its inputs were copied, 0 if they are too large. All ranks must have finished the op
 * that it overwrites: see `overwritten_op`. */
int publish(board *b, uint64_t op, uint64_t signature, const span *inputs, int count);

/* The newest op whose publication this one overwrites. Tiny ones go round all lines, so that a root, which
 * does not wait for the others, need not meet them in every second op; slots have two parities. */
static inline uint64_t overwritten_op(uint64_t op, const span *inputs, int count) {
    uint64_t before = is_tiny(inputs, count) ? RUN_AHEAD : 2;
    return op > before ? op - before : 0;
}

/* Copy input `index` of every other rank to its piece of `into` (NULL: nowhere). Returns TAKEN_ALL,
 * NOT_COPIED if some inputs were too large for slots, or a rank with an input of another size. */
int collect(board *b, uint64_t op, uint64_t index, const span *into);

/* Reduce input `index` of all ranks in rank order, by reduction `kind`. Returns TAKEN_ALL, or a rank with
 * an input of another size. */
int reduce_inputs(board *b, uint64_t op, uint64_t index, long kind, span into);

#endif
