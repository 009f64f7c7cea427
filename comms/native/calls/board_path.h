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

/* Put the inputs and outputs of this rank where `run_op` expects them. */
static void lay_out(Board *board, const fast_call *call) {
    char *from = call->tensor.where.data, *to = call->output.where.data;
    uint64_t nbytes = call->tensor.nbytes, part = nbytes / (uint64_t)board->b.size;
    span *give = board->p.give, *take = board->p.take, whole = {from, nbytes};
    int size = board->b.size;
    switch (call->op) {
    case ALL_REDUCE:
    case BROADCAST:
        give[0] = take[0] = whole;
        break;
    case REDUCE_SCATTER:
        cut(give, from, part, size), take[0] = (span){to, part};
        break;
    case ALL_GATHER:
        give[0] = whole, cut(take, to, nbytes, size);
        break;
    case ALL_TO_ALL:
        cut(give, from, part, size), cut(take, to, part, size);
        break;
    default:
        break;
    }
}

static int board_path_run(fast_path *path, fast_call *call) {
    Board *board = ((BoardPath *)path)->board;
    board_op op = {call->as->signature, call->as->kind};
    if (!board->b.size || atomic_load_explicit(&board->b.stopped, memory_order_relaxed))
        return DECLINED;
    if (enter_journal(path, call) < 0)
        return RAISED;
    lay_out(board, call);
    int end = run_op(board, &op);
    if (end == COMPLETE) {
        path->order->seq++, path->order->joint++;
        return leave_journal(path, Py_None) < 0 ? RAISED : COMPLETED;
    }
    if (end == ERROR)
        PyErr_Clear(); /* the slow path meets the same error again */
    return board->begun > board->number || path->enter ? STARTED : DECLINED;
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
