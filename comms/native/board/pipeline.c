#define PY_SSIZE_T_CLEAN
#include "board/pipeline.h"

#include "process_copy.h"

/* -- the copy mode */

/* The class of an op: its `kind` (below OP_CLASSES / SIZES), and its size to a factor of two. */
static int class_of(int kind, uint64_t nbytes) {
    int size = 0;
    for (uint64_t limit = 1 << 18; size < SIZES - 1 && nbytes > limit; limit *= 2)
        size++;
    return kind * SIZES + size;
}

/* Record the time of one more op of this class, and publish the preferred mode. `took` is 0 if this rank took
 * nothing, or used both modes. */
static void record_time(board *b, class_times *of, int bit, int mode, uint64_t took) {
    uint64_t *best = of->best;
    of->ops++;
    if (took && of->ops >= WARM_UP) {
        uint64_t recent = best[mode] + best[mode] / RETRY_EVERY;
        best[mode] = !recent || took < recent ? took : recent;
    }
    int preferred = !best[STAGED] ? STAGED : !best[IN_PLACE] ? IN_PLACE : best[IN_PLACE] < best[STAGED];
    if (best[STAGED] && best[IN_PLACE] && of->ops % RETRY_EVERY == 0)
        preferred = !preferred;
    word *bits = word_of(b, b->rank, IN_PLACE_BITS);
    uint64_t before = atomic_load_explicit(bits, memory_order_relaxed), one = (uint64_t)1 << bit;
    atomic_store_explicit(bits, preferred ? before | one : before & ~one, memory_order_release);
}

/* Whether all others prefer to read in place. They published that before they began this op. */
static int all_prefer_in_place(const board *b, int bit) {
    return all_have_bits(b, IN_PLACE_BITS, (uint64_t)1 << bit);
}

/* -- blocks */

static inline span block_of(const pipeline *p, span whole, uint64_t step) {
    uint64_t start = step * p->block;
    span none = {whole.at, 0};
    if (start >= whole.nbytes)
        return none;
    span part = {whole.at + start, whole.nbytes - start < p->block ? whole.nbytes - start : p->block};
    return part;
}

/* Whether `rank` has reached block `value` (from 1) of this op; waits for it, but not for long. */
static inline int wait_block(pipeline *p, int rank, int flag, int64_t value) {
    if (value <= 0)
        return 1;
    p->awaited = rank, p->flag = flag, p->value = p->base + (uint64_t)value;
    if (spin_wait(p->b, rank, flag, p->value, p->b->spins, p->b->yields) >= 0 &&
        sleep_wait(p->b, rank, flag, p->value) >= 0)
        return 0;
    if (flag == GIVEN && value == 1)
        probe_read(p->b, rank);
    return 1;
}

static inline int peer_at(const pipeline *p) { return (p->b->rank + p->other) % p->b->size; }

/* -- reading the inputs of other ranks where they lie: by `memcpy` between threads of one process, else by
 * the kernel's copy. A rank returns from the op only after all readers are done, unless it fails. Then it
 * aborts the board first, so a rank that is still reading can tell that its data may be from a later use of
 * the memory. */

/* The word in which `rank` publishes the address of its piece for `to`; with `to` = `rank`, of its piece for
 * all. */
static inline word *place_of(const board *b, int rank, int to) {
    return (word *)(b->base + (uint64_t)rank * b->row + b->places + 8 * (uint64_t)to);
}

/* Whether the kernel can copy from this memory; it cannot from what a device has mapped. */
static inline int is_readable(const board *b, span part) {
    char into;
    int failed;
    struct iovec here = {&into, 1}, there = {part.at, 1};
    return !part.nbytes || copy_pieces(b->pids[b->rank], 0, &here, &there, 1, MOST_AT_ONCE, &failed) == 1;
}

/* Returns 0, or an error number: ESRCH, EFAULT, EPERM. */
static inline int read_from(const board *b, int rank, void *into, uint64_t address, uint64_t nbytes) {
    if (b->pids[rank] == b->pids[b->rank]) {
        copy_bytes(into, (const void *)(uintptr_t)address, nbytes);
        return 0;
    }
    int failed;
    struct iovec here = {into, nbytes}, there = {(void *)(uintptr_t)address, nbytes};
    copy_pieces(b->pids[rank], 0, &here, &there, 1, MOST_AT_ONCE, &failed);
    return failed;
}

/* -- giving */

/* Whether inputs that others read in place stay unchanged until then. An output that overlaps an input may be
 * written first. In an all_reduce they always do: a rank writes a block of another's part only once that rank
 * has read it. */
static int inputs_stay_intact(const pipeline *p) {
    int rank = p->b->rank;
    for (int to = 0; to < p->b->size && !p->reduces_all; to++)
        for (int from = 0; from < p->b->size; from++)
            if ((to == rank) == p->shared && (from == rank) == !!p->combine &&
                overlap(p->give[to], p->take[from]))
                return 0;
    return 1;
}

/* Publish where the pieces for each rank, and for all, lie. 0 if the others cannot read one of them. */
static int expose_inputs(const pipeline *p) {
    for (int to = 0; to < p->b->size; to++) {
        span part = to == p->b->rank && p->reduces_all ? p->take[to] : p->give[to];
        if (!is_readable(p->b, part))
            return 0;
        atomic_store_explicit(place_of(p->b, p->b->rank, to), (uint64_t)(uintptr_t)part.at,
                              memory_order_relaxed);
    }
    return 1;
}

void start_pipeline(pipeline *p, uint64_t op, uint64_t longest) {
    board *b = p->b;
    uint64_t ahead = (uint64_t)b->depth * PAGE, wanted = (longest + ahead - 1) / ahead * PAGE;
    p->block = wanted < LEAST_BLOCK ? LEAST_BLOCK : wanted;
    p->block = p->block < b->block ? p->block : b->block;
    p->steps = (longest + p->block - 1) / p->block;
    p->op = op;
    p->step = 0, p->phase = 0, p->other = 1;
    p->taken[STAGED] = p->taken[IN_PLACE] = 0, p->unreadable = 0;
    p->op_class = class_of(p->reduces_all ? 3 : p->combine ? 2 : p->shared, longest);
    p->near = all_near(b);
    p->past_caches = !p->reduces_all && longest * (uint64_t)b->size >= PAST_CACHES;
    p->mode = b->pids && all_prefer_in_place(b, p->op_class) && inputs_stay_intact(p) && expose_inputs(p)
                  ? IN_PLACE
                  : STAGED;
    atomic_store_explicit(word_of(b, b->rank, UNSTAGED), p->mode == IN_PLACE ? p->base + 1 : 0,
                          memory_order_relaxed);
    probe_write(b);
    p->began = nanoseconds();
}

static inline void stage(pipeline *p, int to, uint64_t step, span part) {
    char *place = staged(p->b, p->b->rank, to, step);
    if (p->near)
        copy_bytes(place, part.at, part.nbytes);
    else
        stream(place, part.at, part.nbytes);
}

static int give(pipeline *p, uint64_t step) {
    board *b = p->b;
    if (p->mode == IN_PLACE) {
        if (!step)
            raise_flag(b, GIVEN, p->base + p->steps);
        return 1;
    }
    for (; p->other < b->size; p->other++) {
        int to = peer_at(p);
        span part = block_of(p, p->give[p->shared ? b->rank : to], step);
        if (!part.nbytes)
            continue;
        if (!wait_block(p, to, p->reduces_all ? REDUCED : TAKEN, (int64_t)step + 1 - b->depth))
            return 0;
        if (!p->shared || p->other == b->size - 1)
            stage(p, p->shared ? b->rank : to, step, part);
    }
    raise_flag(b, GIVEN, p->base + step + 1);
    return 1;
}

/* -- taking */

/* Whether `from`, which has begun this op, lets the others read its inputs in place. */
static inline int in_place(const pipeline *p, int from) {
    return flag_of(p->b, from, UNSTAGED) == p->base + 1;
}

/* Read `nbytes` of the piece of `from` for `to` (`to` = `from`: for all) into `into`. 0 if the read failed,
 * or the board is over. */
static int fetch_in_place(pipeline *p, int from, int to, uint64_t step, void *into, uint64_t nbytes) {
    uint64_t at = atomic_load_explicit(place_of(p->b, from, to), memory_order_relaxed) + step * p->block;
    p->unreadable = read_from(p->b, from, into, at, nbytes);
    if (!p->unreadable && !is_over(p->b))
        return 1;
    p->awaited = from, p->flag = GIVEN, p->value = NEVER;
    return 0;
}

/* out = a (op) the block of `from` for `to` (`to` = `from`: for all). Returns like `fetch_in_place`. */
static int take_block(pipeline *p, int from, int to, uint64_t step, span out, const char *a, int combines) {
    int mode = in_place(p, from);
    const char *block = staged(p->b, from, to, step);
    p->taken[mode]++;
    if (mode == IN_PLACE) {
        if (!fetch_in_place(p, from, to, step, combines ? p->scratch : out.at, out.nbytes))
            return 0;
        block = combines ? p->scratch : out.at;
    }
    if (combines)
        p->combine(out.at, a, block, out.nbytes / p->itemsize);
    else if (mode == STAGED && p->past_caches)
        stream(out.at, block, out.nbytes);
    else if (mode == STAGED)
        copy_bytes(out.at, block, out.nbytes);
    return 1;
}

static int reduce(pipeline *p, uint64_t step) {
    board *b = p->b;
    span mine = block_of(p, p->take[b->rank], step);
    for (; p->other < b->size; p->other++) {
        int from = peer_at(p);
        if (!wait_block(p, from, GIVEN, (int64_t)step + 1))
            return 0;
        if (p->mode == STAGED && !wait_block(p, from, TAKEN, (int64_t)step + 1 - b->depth))
            return 0;
        const char *own = p->other == 1 ? block_of(p, p->give[b->rank], step).at : mine.at;
        if (mine.nbytes && !take_block(p, from, b->rank, step, mine, own, 1))
            return 0;
    }
    if (p->mode == STAGED)
        stage(p, b->rank, step, mine);
    raise_flag(b, REDUCED, p->base + step + 1);
    return 1;
}

static int take(pipeline *p, uint64_t step) {
    board *b = p->b;
    int combines = p->combine && !p->reduces_all;
    for (; p->other < b->size; p->other++) {
        int from = peer_at(p);
        span part = block_of(p, p->take[combines ? b->rank : from], step);
        if (!part.nbytes)
            continue;
        if (!wait_block(p, from, p->reduces_all ? REDUCED : GIVEN, (int64_t)step + 1))
            return 0;
        const char *own = combines && p->other == 1 ? p->own + step * p->block : part.at;
        if (!take_block(p, from, p->reduces_all || p->shared ? from : b->rank, step, part, own, combines))
            return 0;
    }
    raise_flag(b, TAKEN, p->base + step + 1);
    return 1;
}

/* -- the whole op */

/* Whether all ranks have read what this rank exposed. */
static int all_have_taken(pipeline *p) {
    for (; p->other < p->b->size; p->other++)
        if (!wait_block(p, peer_at(p), TAKEN, (int64_t)p->steps))
            return 0;
    return 1;
}

int run_pipeline(pipeline *p) {
    int last = p->reduces_all ? 2 : 1;
    for (; p->step < p->steps + (uint64_t)last; p->step++, p->phase = 0) {
        for (; p->phase <= last; p->phase++, p->other = 1) {
            if (p->step < (uint64_t)p->phase || p->step - (uint64_t)p->phase >= p->steps)
                continue;
            uint64_t step = p->step - (uint64_t)p->phase;
            if (atomic_load_explicit(&p->b->stopped, memory_order_relaxed))
                return 0;
            int done = p->phase == 0 ? give(p, step) : p->phase == last ? take(p, step) : reduce(p, step);
            if (!done)
                return 0;
        }
    }
    if (p->mode == IN_PLACE && !all_have_taken(p))
        return 0;
    int mode = p->taken[IN_PLACE] > 0, both = mode && p->taken[STAGED], none = !mode && !p->taken[STAGED];
    if (p->b->pids)
        record_time(p->b, &p->classes[p->op_class], p->op_class, mode,
                    both || none ? 0 : nanoseconds() - p->began);
    publish_locality(p->b);
    p->base += p->steps, p->op = 0;
    if (!p->reduces_all)
        raise_flag(p->b, REDUCED, p->base);
    return 1;
}
