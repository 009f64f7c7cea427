/* Large collectives as a pipeline of blocks.
 *
 * In a *move*, every rank gives blocks to the others (`give`), and each copies the blocks for it, or reduces
 * them into its own (`take`). In an *all_reduce*, each rank owns a part: the others give their blocks to the
 * owner, which adds them up (`reduce`), and then take the results. A rank copies what it gives into its
 * stage, where it may be `depth` blocks ahead of the others; or it publishes where its inputs lie, and waits
 * at the end until all have read them (see copy_mode.h).
 *
 * `run_pipeline` returns when a rank has to wait for long, and continues from there in the next call. Before
 * an op begins, every rank must know that all have completed the ops before: the stages then hold nothing
 * unread. */

#ifndef HOLDFAST_PIPELINE_H
#define HOLDFAST_PIPELINE_H

#include "board/copy_mode.h"
#include "board/core_locality.h"
#include "kernels/reductions.h"

#define NEVER UINT64_MAX
#define LEAST_BLOCK (32 * 1024)
#define PAGE 4096
/* An output of this size does not stay in caches. A plain store would read each line of it from memory first.
 */
#define PAST_CACHES ((uint64_t)16 << 20)

typedef struct {
    board *b;
    span *give, *take; /* give[d]: this rank's bytes for rank d (own entry: for all); take[s]: where the bytes
                          of rank s go */
    const char *own;   /* in a reducing move: this rank's own input to its result */
    char *scratch;     /* holds a block that was read in place, to be reduced */
    int reduces_all, shared, near;
    int past_caches; /* whether outputs are written past the caches */
    int mode;        /* the mode in which this rank gives */
    kernel combine;
    uint64_t itemsize, block, steps;
    uint64_t op, base; /* number of the op, 0: none is under way; blocks of all earlier ops */
    uint64_t step;     /* position: the step, the phase within it, and which other rank */
    int phase, other;
    int awaited, flag; /* what it waits for */
    uint64_t value;
    int unreadable; /* error number of a failed read of `awaited` */
    class_times classes[OP_CLASSES];
    int op_class, taken[2]; /* blocks taken in each mode */
    uint64_t began;
} pipeline;

/* Start an op; its other fields are set. `longest`: size in bytes of the longest piece that any rank gives to
 * another. */
void start_pipeline(pipeline *p, uint64_t op, uint64_t longest);

/* Continue until the op is complete (1), or has waited for long or failed (0). */
int run_pipeline(pipeline *p);

#endif
