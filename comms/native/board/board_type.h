/* The method of `Board` that runs ops, and the type itself. */

#ifndef HOLDFAST_BOARD_TYPE_H
#define HOLDFAST_BOARD_TYPE_H

#include <structmember.h>

#include "board/run_op.h"

/* Why an op is not complete, as Python gets it. */
static PyObject *halted_tuple(const Board *self) {
    const halted *h = &self->halted;
    int rank = h->rank < 0 ? self->b.size : h->rank;
    return Py_BuildValue("iiKK", h->why, rank, (unsigned long long)h->value, (unsigned long long)h->flag);
}

/* run(signature, kind, give, take): see `run_op`. None once the op is complete, else (why, rank, value, flag). */
static PyObject *board_run(Board *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "signature, kind, give and take are needed");
        return NULL;
    }
    board_op op = {PyLong_AsUnsignedLongLong(args[0]), PyLong_AsLong(args[1])};
    if (PyErr_Occurred() || !check_rank(self, 0))
        return NULL;
    int reduces = is_reduction(collective_of(op.signature));
    if (op.kind >= 0 ? !reduces || !kernel_of(op.kind) : reduces) {
        PyErr_SetString(PyExc_ValueError, "no such reduction");
        return NULL;
    }
    if (self->p.op != self->number + 1) { /* else its pieces are laid out already */
        Py_ssize_t inputs = spans_of(args[2], self->p.give, self->b.size);
        Py_ssize_t outputs = inputs < 0 ? -1 : spans_of(args[3], self->p.take, self->b.size);
        if (outputs < 0)
            return NULL;
        if (inputs != inputs_of(self, &op) || outputs != outputs_of(self, &op)) {
            PyErr_SetString(PyExc_ValueError, "an op of this kind has other numbers of inputs and outputs");
            return NULL;
        }
    }
    int end = run_op(self, &op);
    return end == COMPLETE ? Py_NewRef(Py_None) : end == ERROR ? NULL : halted_tuple(self);
}

static PyMethodDef board_methods[] = {
    FAST("raise_flag", board_raise),
    FAST("sleep_wait", board_sleep_wait),
    PLAIN("is_over", board_is_over),
    PLAIN("stop", board_stop),
    FAST("stop_spinning", board_stop_spinning),
    FAST("wake", board_wake),
    PLAIN("wake_all", board_wake_all),
    PLAIN("prepare_wait", board_prepare_wait),
    PLAIN("futex_wait", board_futex_wait),
    PLAIN("finish_wait", board_finish_wait),
    PLAIN("yield_cpu", board_yield_cpu),
    FAST("run", board_run),
    PLAIN("release", release),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef board_members[] = {
    {"number", T_ULONGLONG, offsetof(Board, number), READONLY, NULL},
    {"roots_before", T_ULONGLONG, offsetof(Board, roots_before), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot board_slots[] = {
    {Py_tp_init, board_init},
    {Py_tp_members, board_members},
    {Py_tp_dealloc, board_dealloc},
    {Py_tp_methods, board_methods},
    {0, NULL},
};

static PyType_Spec board_spec = {
    "holdfast.comms._native.Board", sizeof(Board), 0, Py_TPFLAGS_DEFAULT, board_slots,
};

#endif
