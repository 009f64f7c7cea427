/* The `Order` type of Python: which thread may issue an op of a communicator. The GIL guards it. */

#ifndef HOLDFAST_ORDER_H
#define HOLDFAST_ORDER_H

#include <Python.h>
#include <structmember.h>

#include "arguments.h"

typedef struct {
    PyObject_HEAD
    unsigned long long seq, joint; /* ops issued; ops among them that all ranks share */
    unsigned long begun_by;        /* thread that has to complete an op begun on a fast path; or 0 */
    char busy, begun;              /* an op is being issued or runs; it was begun on a fast path */
    char over, queued;             /* no more ops can run; some are queued */
} Order;

/* Whether this thread may issue an op now: no op is being issued, or this thread has begun one on a fast path. */
static int enter(Order *self) {
    if (self->busy && (!self->begun_by || self->begun_by != PyThread_get_thread_ident()))
        return 0;
    self->begun = self->begun_by != 0;
    self->busy = 1, self->begun_by = 0;
    return 1;
}

static PyObject *order_enter(Order *self, PyObject *nothing) {
    (void)nothing;
    return PyBool_FromLong(enter(self));
}

static PyObject *order_leave(Order *self, PyObject *nothing) {
    (void)nothing;
    self->busy = 0;
    Py_RETURN_NONE;
}

static void order_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    freefunc free_ = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_(object);
    Py_DECREF(type);
}

static PyMethodDef order_methods[] = {PLAIN("enter", order_enter), PLAIN("leave", order_leave), {NULL, NULL, 0, NULL}};

static PyMemberDef order_members[] = {
    {"seq", T_ULONGLONG, offsetof(Order, seq), 0, NULL},
    {"joint", T_ULONGLONG, offsetof(Order, joint), 0, NULL},
    {"busy", T_BOOL, offsetof(Order, busy), READONLY, NULL},
    {"begun", T_BOOL, offsetof(Order, begun), READONLY, NULL},
    {"over", T_BOOL, offsetof(Order, over), 0, NULL},
    {"queued", T_BOOL, offsetof(Order, queued), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot order_slots[] = {
    {Py_tp_dealloc, order_dealloc},
    {Py_tp_methods, order_methods},
    {Py_tp_members, order_members},
    {0, NULL},
};

static PyType_Spec order_spec = {"holdfast.comms._native.Order", sizeof(Order), 0, Py_TPFLAGS_DEFAULT, order_slots};

#endif
