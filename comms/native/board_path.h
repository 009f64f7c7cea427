/* The `BoardPath` of Python: small ops over a board. What does not fit into slots, or cannot be finished while it looks for
 * the others, is left to the way through Python; there an op that was published here is gone on with. */

#ifndef HOLDFAST_BOARD_PATH_H
#define HOLDFAST_BOARD_PATH_H

#include "board_type.h"
#include "fast_path.h"

typedef struct {
    fast_path path;
    Board *board;
} BoardPath;

static int learn_signature(plan *at) {
    return PyArg_ParseTuple(at->said, "Kl", &at->signature, &at->kind) ? 0 : -1;
}

static void cut(span *into, char *at, uint64_t nbytes, int pieces) {
    for (int i = 0; i < pieces; i++)
        into[i].at = at + (uint64_t)i * nbytes, into[i].nbytes = nbytes;
}

/* What this rank gives is in `give`. As `exchange_all`. */
static int broadcast_all(Board *board, uint64_t op, uint64_t signature, int src, span into) {
    int here = src == board->b.rank, copied = publish_(board, op, signature, here);
    uint64_t nbytes;
    if (copied < 0 || here)
        return copied < 0 ? copied : finish(board, op, copied);
    if (await(board, src, PUBLISHED, op) >= 0 || !agrees(&board->b, src, op))
        return copied | NOT_MET;
    const char *theirs = input(&board->b, src, op, 0, &nbytes);
    if (!theirs || nbytes != into.nbytes)
        return copied | NOT_MET;
    move(into, theirs);
    return finish(board, op, copied);
}

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
        call->tensor.nbytes > board->b.slot || (reduces && !kernel_of(call->as->kind)))
        return LEFT;
    if (enter_journal(path, call) < 0)
        return RAISED;
    int done = run_on_board(board, call);
    if (done >= DONE) {
        board->number++, path->order->seq++, path->order->joint++;
        return leave_journal(path, Py_None) < 0 ? RAISED : ENDED;
    }
    if (done == FAILED)
        PyErr_Clear(); /* whoever goes the other way meets it again */
    if (done > 0)
        board->begun = board->number + 1;
    return done > 0 || path->enter ? BEGUN : LEFT;
}

static int board_path_init(PyObject *object, PyObject *args, PyObject *named) {
    BoardPath *self = (BoardPath *)object;
    static char *names[] = {"board", "order", "plan", "observers", "journal", NULL};
    state *made = PyType_GetModuleState(Py_TYPE(object));
    PyObject *board, *order, *asked, *observers, *journal;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O!O!OOO", names, made->board, &board, made->order, &order, &asked,
                                     &observers, &journal))
        return -1;
    self->board = (Board *)Py_NewRef(board);
    self->path.learn = learn_signature, self->path.run = board_path_run;
    return fast_init(&self->path, order, asked, observers, journal, self->board->b.size, &made->known);
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
