/* The `BoardPath` type of Python: fast paths over a board. If a peer is late, the slow path in Python resumes the same
 * op. */

#ifndef HOLDFAST_BOARD_PATH_H
#define HOLDFAST_BOARD_PATH_H

#include "board/board_type.h"
#include "calls/fast_path.h"

typedef struct {
    fast_path path;
    Board *board;
} BoardPath;

static int parse_signature(plan *at) {
    return PyArg_ParseTuple(at->answer, "Kl", &at->signature, &at->kind) ? 0 : -1;
}

static void cut(span *into, char *at, uint64_t nbytes, int pieces) {
    for (int i = 0; i < pieces; i++)
        into[i].at = at + (uint64_t)i * nbytes, into[i].nbytes = nbytes;
}

/* -- small ops; they return like `exchange_all`: 0 if all ranks match and the inputs are too large for slots */

/* The input is in `give`. */
static int broadcast_all(Board *board, uint64_t op, uint64_t signature, int src, span into) {
    int here = src == board->b.rank, copied = publish_(board, op, signature, here);
    uint64_t nbytes;
    if (copied < 0 || (here && copied))
        return copied < 0 ? copied : finish(board, op, copied);
    if (!here && (wait_for(board, src, PUBLISHED, op) >= 0 || !has_same_op(&board->b, src, op)))
        return copied | NOT_MET;
    const char *theirs = here ? NULL : input(&board->b, src, op, 0, &nbytes);
    if (!theirs)
        return all_match(board, op, 0) ? 0 : copied | NOT_MET;
    if (nbytes != into.nbytes)
        return copied | NOT_MET;
    probe_large_input(&board->b, src, nbytes);
    move(into, theirs);
    publish_locality(&board->b);
    return finish(board, op, copied);
}

/* -- large ones */

static uint64_t input_size(const board *b, int rank, uint64_t op, int index) {
    uint64_t nbytes;
    (void)input(b, rank, op, (uint64_t)index, &nbytes);
    return nbytes;
}

/* Whether all ranks give each other pieces of this size; the slow path refuses other sizes. */
static int sizes_fit(const board *b, fast_op kind, uint64_t op, uint64_t nbytes) {
    for (int from = 0; from < b->size; from++)
        for (int to = 0; to < b->size; to++)
            if (from != to && input_size(b, from, op, kind == ALL_GATHER ? 0 : to) != nbytes)
                return 0;
    return 1;
}

/* Begin an op that all ranks have published. 1; 0 if the slow path has to run it; -1 with a Python error. */
static int begin_large(Board *board, uint64_t op, const fast_call *call) {
    pipeline *p = &board->p;
    char *from = call->tensor.where.data, *to = call->output.where.data;
    int size = board->b.size, rank = board->b.rank, all = call->op == ALL_REDUCE, shared = 0, fits = 1;
    uint64_t nbytes = call->tensor.nbytes, longest = nbytes / (uint64_t)size;
    memset(p->give, 0, (size_t)size * sizeof(span)), memset(p->take, 0, (size_t)size * sizeof(span));
    switch (call->op) {
    case ALL_REDUCE: {
        uint64_t count = call->tensor.count, item = nbytes / count, parts = (uint64_t)size;
        for (uint64_t part = 0; part < parts; part++) {
            uint64_t start = count * part / parts, stop = count * (part + 1) / parts;
            p->give[part] = p->take[part] = (span){from + start * item, (stop - start) * item};
        }
        longest = (count + parts - 1) / parts * item;
        break;
    }
    case REDUCE_SCATTER:
        cut(p->give, from, longest, size);
        p->take[rank] = (span){to, longest};
        fits = sizes_fit(&board->b, call->op, op, longest) && !overlap(p->take[rank], (span){from, nbytes});
        break;
    case BROADCAST:
        (rank == call->src ? p->give : p->take)[call->src] = (span){from, nbytes};
        shared = 1, longest = nbytes;
        break;
    case ALL_GATHER:
        p->give[rank] = (span){from, nbytes};
        cut(p->take, to, nbytes, size);
        shared = 1, longest = nbytes, fits = sizes_fit(&board->b, call->op, op, nbytes);
        break;
    case ALL_TO_ALL:
        cut(p->give, from, longest, size), cut(p->take, to, longest, size);
        p->give[rank].nbytes = 0;
        fits = sizes_fit(&board->b, call->op, op, longest);
        break;
    default:
        return 0;
    }
    return !fits ? 0 : begin_pipeline(board, op, longest, call->as->kind, all, shared, p->give[rank].at) ? 1 : -1;
}

/* Returns like `exchange_all`. */
static int run_large(Board *board, uint64_t op, const fast_call *call) {
    int begun = board->b.size > 1 ? begin_large(board, op, call) : 0;
    return begun < 0 ? FAILED : begun && run_without_gil(board) ? finish(board, op, 0) : NOT_MET;
}

/* -- all ops */

static int run_on_board(Board *board, fast_call *call) {
    char *from = call->tensor.where.data, *to = call->output.where.data;
    uint64_t nbytes = call->tensor.nbytes, op = board->number + 1, signature = call->as->signature;
    int size = board->b.size, rank = board->b.rank;
    span *give = board->p.give, *take = board->p.take, whole = {from, nbytes};
    switch (call->op) {
    case ALL_REDUCE:
        give[0] = whole;
        return reduce_all(board, op, signature, 1, 0, call->as->kind, whole);
    case REDUCE_SCATTER:
        cut(give, from, nbytes / (uint64_t)size, size);
        return reduce_all(board, op, signature, size, (uint64_t)rank, call->as->kind, (span){to, nbytes / (uint64_t)size});
    case BROADCAST:
        give[0] = whole;
        return broadcast_all(board, op, signature, (int)call->src, whole);
    case ALL_GATHER:
        give[0] = whole;
        cut(take, to, nbytes, size);
        return exchange_all(board, op, signature, 1, take, 0, from);
    case ALL_TO_ALL:
        cut(give, from, nbytes / (uint64_t)size, size);
        cut(take, to, nbytes / (uint64_t)size, size);
        give[rank].nbytes = 0;
        return exchange_all(board, op, signature, size, take, (uint64_t)rank, give[rank].at);
    default:
        return exchange_all(board, op, signature, 0, NULL, 0, NULL);
    }
}

static int board_path_run(fast_path *path, fast_call *call) {
    Board *board = ((BoardPath *)path)->board;
    int reduces = call->op == ALL_REDUCE || call->op == REDUCE_SCATTER;
    if (!board->b.size || atomic_load_explicit(&board->b.stopped, memory_order_relaxed) ||
        (reduces && !kernel_of(call->as->kind)))
        return DECLINED;
    if (enter_journal(path, call) < 0)
        return RAISED;
    int done = run_on_board(board, call);
    if (!done)
        done = run_large(board, board->number + 1, call);
    if (done >= DONE) {
        board->number++, path->order->seq++, path->order->joint++;
        return leave_journal(path, Py_None) < 0 ? RAISED : COMPLETED;
    }
    if (done == FAILED)
        PyErr_Clear(); /* the slow path meets the same error again */
    if (done > 0)
        board->begun = board->number + 1;
    return done > 0 || path->enter ? STARTED : DECLINED;
}

static int board_path_init(PyObject *object, PyObject *args, PyObject *named) {
    BoardPath *self = (BoardPath *)object;
    static char *names[] = {"board", "order", "plan", "observers", "journal", NULL};
    state *made = PyType_GetModuleState(Py_TYPE(object));
    PyObject *board, *order, *planner, *observers, *journal;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O!O!OOO", names, made->board, &board, made->order, &order, &planner,
                                     &observers, &journal))
        return -1;
    self->board = (Board *)Py_NewRef(board);
    self->path.parse = parse_signature, self->path.run = board_path_run;
    return fast_init(&self->path, order, planner, observers, journal, self->board->b.rank, self->board->b.size,
                     &made->known);
}

static void board_path_dealloc(PyObject *object) {
    Py_XDECREF((PyObject *)((BoardPath *)object)->board);
    fast_dealloc((fast_path *)object);
}

static PyType_Slot board_path_slots[] = {
    {Py_tp_init, board_path_init},
    {Py_tp_dealloc, board_path_dealloc},
    {Py_tp_methods, fast_methods},
    {0, NULL},
};

static PyType_Spec board_path_spec = {
    "holdfast.comms._native.BoardPath", sizeof(BoardPath), 0, Py_TPFLAGS_DEFAULT, board_path_slots,
};

#endif
