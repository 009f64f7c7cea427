#define PY_SSIZE_T_CLEAN
#include "board/run_op.h"

/* `spin_wait`, then `sleep_wait`; without the GIL unless the first check succeeds. Without spins and yields
 * the one check is all, so it looks at the flag beside the line: Python waits for that, and would resume at
 * once. */
static int wait_for(Board *self, int rank, int flag, uint64_t value) {
    board *b = &self->b;
    if (flag == PUBLISHED_ON_LINE && b->spins + b->yields <= 0)
        flag = PUBLISHED;
    int missing = spin_wait(b, rank, flag, value, 0, 0);
    if (missing >= 0 && b->spins + b->yields > 0) {
        Py_BEGIN_ALLOW_THREADS;
        missing = spin_wait(b, rank, flag, value, b->spins, b->yields);
        if (missing >= 0)
            missing = sleep_wait(b, rank, flag, value);
        Py_END_ALLOW_THREADS;
    }
    return missing;
}

/* plan.py packs signatures: the collective in 4 bits, the reduction, the dtype, the root, the number of
 * elements. */
static inline int root_of(uint64_t signature) { return (int)(signature >> ROOT_BIT & ROOT_MASK); }

enum { NONE, ONE, EACH }; /* EACH: one for each rank */

static const struct {
    char inputs[2], outputs[2]; /* of other ranks, of the root; equal if there is none */
} shapes[16] = {
    [ALL_REDUCE] = {{ONE, ONE}, {ONE, ONE}},       [REDUCE] = {{ONE, ONE}, {NONE, ONE}},
    [BROADCAST] = {{NONE, ONE}, {ONE, NONE}},      [ALL_GATHER] = {{ONE, ONE}, {EACH, EACH}},
    [REDUCE_SCATTER] = {{EACH, EACH}, {ONE, ONE}}, [ALL_TO_ALL] = {{EACH, EACH}, {EACH, EACH}},
    [GATHER] = {{ONE, ONE}, {NONE, EACH}},         [SCATTER] = {{NONE, EACH}, {ONE, ONE}},
    [BARRIER] = {{NONE, NONE}, {NONE, NONE}},
};

static int count_of(const Board *self, int shape) { return shape == EACH ? self->b.size : shape; }

int inputs_of(const Board *self, const board_op *of) {
    int here = root_of(of->signature) == self->b.rank;
    return count_of(self, shapes[collective_of(of->signature)].inputs[here]);
}

int outputs_of(const Board *self, const board_op *of) {
    int here = root_of(of->signature) == self->b.rank;
    return count_of(self, shapes[collective_of(of->signature)].outputs[here]);
}

static int halt(Board *self, int why, int rank, uint64_t value, uint64_t flag) {
    self->halted = (halted){why, rank, value, flag};
    return why;
}

void move(span into, const void *from) {
    if (!into.nbytes || into.at == from)
        return;
    if (into.nbytes <= 1 << 14) {
        copy_bytes(into.at, from, into.nbytes);
        return;
    }
    Py_BEGIN_ALLOW_THREADS;
    if (into.nbytes >= PAST_CACHES / 2 && !overlap(into, (span){(char *)(uintptr_t)from, into.nbytes}))
        stream(into.at, from, into.nbytes);
    else
        copy_bytes(into.at, from, into.nbytes);
    Py_END_ALLOW_THREADS;
}

/* -- publish */

/* The signature with a digest of the roots of all ops so far, this one included, in place of its root. A root
 * that has copied its input does not wait for the other ranks, so ranks that name different roots may not
 * meet in that op; the next op in which they meet finds that their digests differ. */
static uint64_t with_roots(Board *self, uint64_t signature) {
    self->roots_before = self->roots;
    if (ROOTED >> collective_of(signature) & 1)
        self->roots = (5 * self->roots + (signature >> ROOT_BIT) + 1) & ROOT_MASK;
    return (signature & ~((uint64_t)ROOT_MASK << ROOT_BIT)) | self->roots << ROOT_BIT;
}

/* Take what this rank keeps out of its inputs. Returns where it lies; `into` is where it goes. */
static const char *own_piece(Board *self, collective what, int root, span *into) {
    span *give = self->p.give, *take = self->p.take, nothing = {NULL, 0};
    int rank = self->b.rank;
    *into = nothing;
    switch (what) {
    case ALL_GATHER:
        *into = take[rank];
        return give->at;
    case ALL_TO_ALL:
        *into = take[rank], give[rank].nbytes = 0;
        return give[rank].at;
    case GATHER:
        if (rank == root)
            *into = take[rank];
        return give->at;
    case SCATTER:
        if (rank == root)
            *into = *take, give[rank].nbytes = 0;
        return give[rank].at;
    default:
        return NULL;
    }
}

/* Publish the op, and copy what this rank keeps; of an op that was begun already, check that it is the same.
 */
static int publish_once(Board *self, uint64_t op, const board_op *of) {
    span into;
    const char *own = own_piece(self, collective_of(of->signature), root_of(of->signature), &into);
    int count = inputs_of(self, of);
    const char *from = count ? self->p.give->at : NULL;
    if (op == self->begun) {
        if (of->signature == self->signature && from == self->from)
            return COMPLETE;
        PyErr_SetString(PyExc_RuntimeError, "another op was begun here, and never ended");
        return ERROR;
    }
    /* another rank may still have to read what lies there */
    uint64_t before = overwritten_op(op, self->p.give, count), free_at = 4 * before + 3;
    if (self->b.all_finished < before && wait_for(self, EVERY_RANK, FLAG, free_at) >= 0)
        return halt(self, WAITS, EVERY_RANK, free_at, FLAG);
    self->b.all_finished = before > self->b.all_finished ? before : self->b.all_finished;
    self->copied = publish(&self->b, op, with_roots(self, of->signature), self->p.give, count);
    self->begun = op, self->from = from, self->signature = of->signature;
    move(into, own);
    return COMPLETE;
}

/* -- meet */

/* The rank on which this rank depends if all inputs are in slots: one, EVERY_RANK, or NO_RANK for a root that
 * only gives. */
static int whom_to_meet(const Board *self, collective what, int root) {
    int here = root == self->b.rank;
    switch (what) {
    case REDUCE: /* what it gives goes to the root alone */
        return here || !self->copied ? EVERY_RANK : root;
    case BROADCAST:
    case SCATTER:
        return !here ? root : self->copied ? NO_RANK : EVERY_RANK;
    default:
        return EVERY_RANK;
    }
}

/* Wait until that rank, or every one, has published this op. */
static int meet(Board *self, uint64_t op, int whom) {
    board *b = &self->b;
    /* tiny ops lie on one cache line: a rank that published there expects the others there */
    int how = self->copied && line_of(b, b->rank, op) ? PUBLISHED_ON_LINE : PUBLISHED;
    if (whom == NO_RANK)
        return COMPLETE;
    if (wait_for(self, whom, how, op) >= 0)
        return halt(self, WAITS, whom, 4 * op + 1, FLAG);
    if (whom == EVERY_RANK)
        b->all_finished = op - 1;
    for (int rank = 0; rank < b->size; rank++)
        if ((whom == EVERY_RANK || whom == rank) && !has_same_op(b, rank, op))
            return halt(self, OTHER_OP, rank, 0, 0);
    return COMPLETE;
}

/* -- take from slots */

static int other_size(Board *self, uint64_t op, int rank, int index, uint64_t expected) {
    uint64_t nbytes;
    (void)input(&self->b, rank, op, (uint64_t)index, &nbytes);
    return halt(self, OTHER_SIZE, rank, nbytes, expected);
}

/* Copy, or reduce, input `index` of every other rank, or check that slots hold all of them. LARGE if they do
 * not. */
static int take_all(Board *self, uint64_t op, const board_op *of, int index) {
    board *b = &self->b;
    span *take = outputs_of(self, of) ? self->p.take : NULL;
    int reduces = is_reduction(collective_of(of->signature));
    int rank = collect(b, op, (uint64_t)index, reduces ? NULL : take);
    if (rank == TAKEN_ALL && reduces && take)
        rank = reduce_inputs(b, op, (uint64_t)index, of->kind, *take);
    if (rank >= 0)
        return other_size(self, op, rank, index, take[reduces ? 0 : rank].nbytes);
    return rank == TAKEN_ALL ? COMPLETE : LARGE;
}

/* Copy this rank's input of the root. */
static int take_of_root(Board *self, uint64_t op, int root, int index) {
    board *b = &self->b;
    uint64_t nbytes;
    const char *theirs = input(b, root, op, (uint64_t)index, &nbytes);
    if (nbytes != self->p.take->nbytes)
        return halt(self, OTHER_SIZE, root, nbytes, self->p.take->nbytes);
    if (!theirs)
        return LARGE;
    probe_large_input(b, root, nbytes);
    move(*self->p.take, theirs);
    publish_locality(b);
    return COMPLETE;
}

static int take_small(Board *self, uint64_t op, const board_op *of) {
    collective what = collective_of(of->signature);
    int root = root_of(of->signature), rank = self->b.rank;
    switch (what) {
    case REDUCE:
        return !self->copied ? LARGE : rank == root ? take_all(self, op, of, 0) : COMPLETE;
    case BROADCAST:
    case SCATTER:
        if (rank == root)
            return self->copied ? COMPLETE : LARGE;
        return take_of_root(self, op, root, what == SCATTER ? rank : 0);
    case REDUCE_SCATTER:
    case ALL_TO_ALL:
        return take_all(self, op, of, rank);
    default:
        return take_all(self, op, of, 0);
    }
}

/* -- large inputs */

/* Keep only the piece for, or of, one rank. */
static void only(span *pieces, int size, int rank, span piece) {
    memset(pieces, 0, (size_t)size * sizeof *pieces);
    pieces[rank] = piece;
}

static uint64_t input_size(const board *b, int rank, uint64_t op, int index) {
    uint64_t nbytes;
    (void)input(b, rank, op, (uint64_t)index, &nbytes);
    return nbytes;
}

/* The size of the longest piece that any rank gives to another: all ranks read the same from the tables. */
static uint64_t longest_piece(const board *b, uint64_t op, collective what, int root) {
    int one = what == ALL_GATHER || what == GATHER;
    uint64_t longest = 0;
    for (int from = 0; from < b->size; from++)
        for (int to = 0; to < b->size; to++) {
            int none = from == to || (what == GATHER && to != root) || (what == SCATTER && from != root);
            uint64_t nbytes = none ? 0 : input_size(b, from, op, one ? 0 : to);
            longest = nbytes > longest ? nbytes : longest;
        }
    return longest;
}

/* Divide an all_reduce: each rank owns a part. Returns the size of the largest. */
static uint64_t divide(span *give, span *take, uint64_t parts, size_t item) {
    span from = *give, to = *take;
    uint64_t count = to.nbytes / item;
    for (uint64_t part = 0; part < parts; part++) {
        uint64_t start = count * part / parts * item, stop = count * (part + 1) / parts * item;
        give[part] = (span){from.at + start, stop - start};
        take[part] = (span){to.at + start, stop - start};
    }
    return (count + parts - 1) / parts * item;
}

/* Begin the pipeline of an op that all ranks have published. COMPLETE: it has begun. */
static int begin_large(Board *self, uint64_t op, const board_op *of) {
    collective what = collective_of(of->signature);
    pipeline *p = &self->p;
    int size = self->b.size, rank = self->b.rank, root = root_of(of->signature), here = root == rank;
    span first = *p->give, into = *p->take, nothing = {NULL, 0};
    uint64_t longest = 0;
    p->shared = 0, p->reduces_all = 0;
    switch (what) {
    case ALL_REDUCE:
        p->reduces_all = 1, longest = divide(p->give, p->take, (uint64_t)size, itemsize_of(of->kind));
        break;
    case REDUCE:
        only(p->give, size, root, first), only(p->take, size, rank, here ? into : nothing),
            longest = first.nbytes;
        break;
    case REDUCE_SCATTER:
        for (int from = 0; from < size; from++)
            if (from != rank && input_size(&self->b, from, op, rank) != into.nbytes)
                return other_size(self, op, from, rank, into.nbytes);
        only(p->take, size, rank, into);
        break;
    case BROADCAST:
        only(p->give, size, rank, here ? first : nothing), only(p->take, size, root, here ? nothing : into);
        p->shared = 1, longest = here ? first.nbytes : into.nbytes;
        break;
    case ALL_GATHER:
        only(p->give, size, rank, first), p->shared = 1;
        break;
    case GATHER:
        only(p->give, size, root, first);
        if (!here)
            memset(p->take, 0, (size_t)size * sizeof(span));
        break;
    case SCATTER:
        only(p->take, size, root, here ? nothing : into);
        if (!here)
            memset(p->give, 0, (size_t)size * sizeof(span));
        break;
    default: /* an all_to_all has its pieces */
        break;
    }
    if (of->kind >= 0 && !p->scratch && !(p->scratch = PyMem_Malloc(self->b.block))) {
        PyErr_NoMemory();
        return ERROR;
    }
    p->own = p->give[rank].at;
    p->combine = of->kind >= 0 ? kernel_of(of->kind) : NULL;
    p->itemsize = of->kind >= 0 ? itemsize_of(of->kind) : 1;
    start_pipeline(p, op, longest ? longest : longest_piece(&self->b, op, what, root));
    return COMPLETE;
}

static int run_large(Board *self) {
    pipeline *p = &self->p;
    int done;
    Py_BEGIN_ALLOW_THREADS;
    done = run_pipeline(p);
    Py_END_ALLOW_THREADS;
    if (done)
        return COMPLETE;
    if (p->unreadable)
        return halt(self, UNREADABLE, p->awaited, (uint64_t)p->unreadable, 0);
    return halt(self, WAITS, p->awaited, p->value, (uint64_t)p->flag);
}

/* -- the whole op */

/* Publish, meet and take; LARGE once the pipeline has begun. */
static int run_small(Board *self, uint64_t op, const board_op *of) {
    collective what = collective_of(of->signature);
    int end = publish_once(self, op, of);
    if (end != COMPLETE)
        return end;
    if (self->b.size == 1) { /* it keeps what it gives */
        if (is_reduction(what))
            move(*self->p.take, self->p.give->at);
        return COMPLETE;
    }
    int whom = whom_to_meet(self, what, root_of(of->signature));
    if ((end = meet(self, op, whom)) != COMPLETE || (end = take_small(self, op, of)) != LARGE)
        return end;
    /* a stage may hold data of the op before until every rank has begun this one */
    if (whom != EVERY_RANK && (end = meet(self, op, EVERY_RANK)) != COMPLETE)
        return end;
    return (end = begin_large(self, op, of)) == COMPLETE ? LARGE : end;
}

int run_op(Board *self, const board_op *of) {
    uint64_t op = self->number + 1;
    int end = self->p.op == op ? LARGE : run_small(self, op, of);
    if (end == LARGE)
        end = run_large(self);
    if (end == COMPLETE) {
        raise_flag(&self->b, FLAG, 4 * op + 3);
        self->number = op;
    }
    return end;
}
