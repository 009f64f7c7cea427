/* Types of Python that begin a call on a window: `ActiveCalls` counts the calls under way, `WindowBounds`
 * checks that a transfer fits. The GIL guards both. */

#define PY_SSIZE_T_CLEAN
#include "calls/order.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD const tensors *known;
    PyObject *refusal; /* makes the error of a call after the end */
    PyObject *tensor;  /* the exposed tensor, or NULL; its address and size at first; `moved` makes the error
                          if they change */
    PyObject *moved;
    char *address;
    uint64_t nbytes;
    Py_ssize_t running;
    unsigned long entered_by; /* the thread whose call began last; 0 once that has ended */
    PyObject *left;           /* see `run_when_left`; while calls run */
    char over;
} ActiveCalls;

typedef struct {
    PyObject_HEAD const tensors *known;
    uint64_t *sizes; /* size of each rank's window in bytes */
    Py_ssize_t ranks;
    uint64_t itemsize;
    int32_t dtype; /* as torch calls it */
} WindowBounds;

/* -- ActiveCalls: a context manager around each call; refuses calls after the end, or once the exposed tensor
 * has moved */

static int calls_init(PyObject *object, PyObject *args, PyObject *named) {
    ActiveCalls *self = (ActiveCalls *)object;
    state *made = PyType_GetModuleState(Py_TYPE(object));
    static char *names[] = {"refusal", "tensor", "moved", NULL};
    PyObject *refusal, *tensor = NULL, *moved = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O|OO", names, &refusal, &tensor, &moved))
        return -1;
    self->known = &made->known, self->refusal = Py_NewRef(refusal);
    if (!tensor || !moved)
        return 0;
    self->tensor = Py_NewRef(tensor), self->moved = Py_NewRef(moved);
    return find_tensor(self->known, tensor, &self->address, &self->nbytes);
}

/* Raise the error that a function made. */
static PyObject *calls_raise(PyObject *error) {
    if (error)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    return NULL;
}

/* Whether the tensor has the same address and size; 0 if these cannot be found any more; -1 with a Python
 * error that is none of the tensor's, such as a KeyboardInterrupt. */
static int tensor_is_unmoved(const ActiveCalls *self) {
    char *address;
    uint64_t nbytes;
    if (!self->tensor)
        return 1;
    if (find_tensor(self->known, self->tensor, &address, &nbytes) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear();
        return 0;
    }
    return address == self->address && nbytes == self->nbytes;
}

static PyObject *calls_enter(ActiveCalls *self, PyObject *nothing) {
    (void)nothing;
    if (self->over)
        return calls_raise(PyObject_CallNoArgs(self->refusal));
    int unmoved = tensor_is_unmoved(self);
    if (unmoved < 0)
        return NULL;
    if (!unmoved) {
        self->over = !self->running;
        return calls_raise(PyObject_CallFunctionObjArgs(self->moved, self->over ? Py_True : Py_False, NULL));
    }
    self->running++, self->entered_by = PyThread_get_thread_ident();
    Py_RETURN_NONE;
}

static PyObject *calls_exit(ActiveCalls *self, PyObject *const *error, Py_ssize_t count) {
    (void)error, (void)count;
    self->running--;
    if (self->entered_by == PyThread_get_thread_ident())
        self->entered_by = 0;
    return self->running ? Py_NewRef(Py_None) : run_when_left(&self->left);
}

static PyObject *calls_end(ActiveCalls *self, PyObject *nothing) {
    (void)nothing;
    int first = !self->over;
    self->over = 1;
    Py_CLEAR(self->tensor);
    return PyBool_FromLong(first);
}

/* when_left(call): call it when the calls under way have ended, if this thread is inside one, which a
 * signal's handler has interrupted. False if it is in none. */
static PyObject *calls_when_left(ActiveCalls *self, PyObject *call) {
    if (!self->running || self->entered_by != PyThread_get_thread_ident())
        Py_RETURN_FALSE;
    return add_when_left(&self->left, call);
}

static void calls_dealloc(PyObject *object) {
    ActiveCalls *self = (ActiveCalls *)object;
    Py_XDECREF(self->left);
    Py_XDECREF(self->refusal);
    Py_XDECREF(self->tensor);
    Py_XDECREF(self->moved);
    free_object(object);
}

static PyMethodDef calls_methods[] = {
    PLAIN("__enter__", calls_enter), FAST("__exit__", calls_exit),
    PLAIN("end", calls_end),         {"when_left", (PyCFunction)calls_when_left, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef calls_members[] = {
    {"running", T_PYSSIZET, offsetof(ActiveCalls, running), READONLY, NULL},
    {"over", T_BOOL, offsetof(ActiveCalls, over), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot calls_slots[] = {
    {Py_tp_init, calls_init},
    {Py_tp_dealloc, calls_dealloc},
    {Py_tp_methods, calls_methods},
    {Py_tp_members, calls_members},
    {0, NULL},
};

PyType_Spec calls_spec = {"holdfast.comms._native.ActiveCalls", sizeof(ActiveCalls), 0, Py_TPFLAGS_DEFAULT,
                          calls_slots};

/* -- WindowBounds: the windows of all ranks, of one dtype */

static int bounds_init(PyObject *object, PyObject *args, PyObject *named) {
    WindowBounds *self = (WindowBounds *)object;
    state *made = PyType_GetModuleState(Py_TYPE(object));
    static char *names[] = {"like", "sizes", NULL};
    PyObject *like, *sizes;
    dlpack_tensor where;
    uint64_t nbytes;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OO!", names, &like, &PyTuple_Type, &sizes))
        return -1;
    self->known = &made->known, self->ranks = PyTuple_Size(sizes);
    self->sizes = PyMem_Calloc((size_t)self->ranks + 1, sizeof *self->sizes);
    if (!self->sizes) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->ranks; i++)
        self->sizes[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(sizes, i));
    if (PyErr_Occurred())
        return -1;
    if (is_dense(self->known, like, on_cpu, &where, &nbytes))
        self->dtype = scalar_type(self->known, like), self->itemsize = (uint64_t)where.lanes * where.bits / 8;
    return 0;
}

/* byte_offset(tensor, rank, offset): where a transfer that fits begins, in bytes; -1 if it does not fit or is
 * unusual, so that Python has to check it. */
static PyObject *bounds_byte_offset(WindowBounds *self, PyObject *const *args, Py_ssize_t count) {
    dlpack_tensor where;
    uint64_t nbytes;
    if (count != 3) {
        PyErr_Format(PyExc_TypeError, "expected 3 arguments, got %zd", count);
        return NULL;
    }
    if (!PyLong_CheckExact(args[1]) || !PyLong_CheckExact(args[2]))
        return PyLong_FromLong(-1);
    Py_ssize_t rank = PyLong_AsSsize_t(args[1]), offset = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        PyErr_Clear(), rank = -1;
    if (rank < 0 || rank >= self->ranks || offset < 0 || !self->itemsize ||
        !is_plain(self->known, args[0], on_cpu, &where, &nbytes) ||
        scalar_type(self->known, args[0]) != self->dtype)
        return PyErr_Occurred() ? NULL : PyLong_FromLong(-1);
    uint64_t room = self->sizes[rank] / self->itemsize, elements = nbytes / self->itemsize;
    if ((uint64_t)offset > room || elements > room - (uint64_t)offset)
        return PyLong_FromLong(-1);
    return PyLong_FromUnsignedLongLong((uint64_t)offset * self->itemsize);
}

static void bounds_dealloc(PyObject *object) {
    PyMem_Free(((WindowBounds *)object)->sizes);
    free_object(object);
}

static PyMethodDef bounds_methods[] = {FAST("byte_offset", bounds_byte_offset), {NULL, NULL, 0, NULL}};

static PyType_Slot bounds_slots[] = {
    {Py_tp_init, bounds_init},
    {Py_tp_dealloc, bounds_dealloc},
    {Py_tp_methods, bounds_methods},
    {0, NULL},
};

PyType_Spec bounds_spec = {"holdfast.comms._native.WindowBounds", sizeof(WindowBounds), 0, Py_TPFLAGS_DEFAULT,
                           bounds_slots};
