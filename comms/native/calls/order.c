#define PY_SSIZE_T_CLEAN
#include "calls/order.h"

#include <structmember.h>

PyObject *add_when_left(PyObject **left, PyObject *call) {
    if (!*left && !(*left = PyList_New(0)))
        return NULL;
    return PyList_Append(*left, call) < 0 ? NULL : Py_NewRef(Py_True);
}

PyObject *run_when_left(PyObject **left) {
    if (!*left)
        Py_RETURN_NONE;
    PyObject *calls = *left, *type, *error, *traceback;
    int failed = 0;
    *left = NULL;
    PyErr_Fetch(&type, &error, &traceback);
    for (Py_ssize_t i = 0; i < PyList_Size(calls); i++) {
        PyObject *done = PyObject_CallNoArgs(PyList_GetItem(calls, i));
        if (!done) {
            Py_XDECREF(type), Py_XDECREF(error), Py_XDECREF(traceback);
            PyErr_Fetch(&type, &error, &traceback);
            failed = 1;
        }
        Py_XDECREF(done);
    }
    Py_DECREF(calls);
    PyErr_Restore(type, error, traceback);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* Whether this thread may issue an op now: no op is being issued, or this thread has begun one on a fast
 * path. */
static int enter(Order *self) {
    unsigned long here = PyThread_get_thread_ident();
    if (self->busy && (!self->begun_by || self->begun_by != here))
        return 0;
    self->begun = self->begun_by != 0;
    self->busy = 1, self->begun_by = 0, self->held_by = here;
    return 1;
}

static void leave(Order *self) { self->busy = 0, self->held_by = 0; }

/* A `with` block is let in or not, which it is told. No signal's handler runs between that and the block, nor
 * between the block and its end. */
static PyObject *order_begin(Order *self, PyObject *nothing) {
    (void)nothing;
    int in = enter(self);
    if (!in && self->held_by == PyThread_get_thread_ident())
        self->refused++;
    return PyBool_FromLong(in);
}

static PyObject *order_end(Order *self, PyObject *const *error, Py_ssize_t count) {
    (void)error, (void)count;
    if (self->held_by != PyThread_get_thread_ident())
        Py_RETURN_NONE;
    if (self->refused) {
        self->refused--;
        Py_RETURN_NONE;
    }
    leave(self);
    return run_when_left(&self->left);
}

/* when_left(call): call it when the op of this thread, which a signal's handler has interrupted, has ended.
 * False if this thread is in no op. */
static PyObject *order_when_left(Order *self, PyObject *call) {
    if (!self->busy || self->begun_by || self->held_by != PyThread_get_thread_ident())
        Py_RETURN_FALSE;
    return add_when_left(&self->left, call);
}

/* Whether no op can touch the transport once `over` is set: none runs. One that a fast path has begun goes on
 * in Python, which looks at `over` first. */
static PyObject *order_idle(Order *self, void *nothing) {
    (void)nothing;
    return PyBool_FromLong(!self->busy || self->begun_by);
}

static void order_dealloc(PyObject *object) {
    Py_XDECREF(((Order *)object)->left);
    free_object(object);
}

static PyMethodDef order_methods[] = {
    PLAIN("__enter__", order_begin),
    FAST("__exit__", order_end),
    {"when_left", (PyCFunction)order_when_left, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef order_properties[] = {{"idle", (getter)order_idle, NULL, NULL, NULL},
                                         {NULL, NULL, NULL, NULL, NULL}};

static PyMemberDef order_members[] = {
    {"seq", T_ULONGLONG, offsetof(Order, seq), 0, NULL},
    {"joint", T_ULONGLONG, offsetof(Order, joint), 0, NULL},
    {"busy", T_BOOL, offsetof(Order, busy), READONLY, NULL},
    {"begun", T_BOOL, offsetof(Order, begun), READONLY, NULL},
    {"lost", T_BOOL, offsetof(Order, lost), READONLY, NULL},
    {"over", T_BOOL, offsetof(Order, over), 0, NULL},
    {"queued", T_BOOL, offsetof(Order, queued), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot order_slots[] = {
    {Py_tp_dealloc, order_dealloc},
    {Py_tp_methods, order_methods},
    {Py_tp_members, order_members},
    {Py_tp_getset, order_properties},
    {0, NULL},
};

PyType_Spec order_spec = {"holdfast.comms._native.Order", sizeof(Order), 0, Py_TPFLAGS_DEFAULT, order_slots};
