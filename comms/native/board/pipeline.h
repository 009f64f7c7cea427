/* Large collectives as a pipeline of blocks.
 *
 * In a *move*, every rank gives blocks to the others (`give`), and each copies the blocks for it, or reduces
 * them into its own (`take`). In an *all_reduce*, each rank owns a part: the others give their blocks to the
 * owner, which adds them up (`reduce`), and then take the results. A rank copies what it gives into its
 * stage, where it may be `depth` blocks ahead of the others; or it publishes where its inputs lie, and waits
 * at the end until all have read them.
 *
 * `run_pipeline` returns when a rank has to wait for long, and continues from there in the next call. Before
 * an op begins, every rank must know that all have completed the ops before: the stages then hold nothing
 * unread.
 *
 * The mode, STAGED or IN_PLACE, is chosen by time. STAGED, the ranks copy every byte twice; IN_PLACE, the
 * kernel copies it once but looks up every page. The faster mode depends on processor, kernel and size: on
 * AMD's Zen 3 one wins by up to two thirds, on Intel's Ice Lake the other by as much. Every rank times its
 * ops by class (kind and size) and publishes the mode it prefers for the next op of that class. A rank that
 * gives data uses the mode that all others prefer. The other mode is retried now and then, since machines
 * change. */

#ifndef HOLDFAST_PIPELINE_H
#define HOLDFAST_PIPELINE_H

#include "board/core_locality.h"
#include "kernels/reductions.h"

enum { STAGED, IN_PLACE };
enum { OP_CLASSES = 32, SIZES = 8, RETRY_EVERY = 64 };
enum { WARM_UP = 2 }; /* the first op of a class touches its memory for the first time */

typedef struct {
    uint64_t best[2]; /* recent best nanoseconds of an op in each mode; 0: not known */
    uint64_t ops;
} class_times;

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
