/* The `PreparedOp` type of Python: one op with its arguments, to be started many times.
 *
 * On a fast path the tensors are checked in full once. Each start then only compares where they lie and how
 * large they are. What the fast path does not take, and a start with options, goes to `general(async_op,
 * timeout)`. */

#define PY_SSIZE_T_CLEAN
#include "calls/fast_path.h"

enum { MOST_ARGUMENTS = 3 };

typedef struct {
    PyObject_HEAD fast_path *path; /* NULL: all starts are general */
    PyObject *args[MOST_ARGUMENTS];
    PyObject *general, *done; /* done: what a start returns that is complete */
    fast_call call;
    int checked; /* whether `call` describes the arguments */
} PreparedOp;

static int prepared_init(PyObject *object, PyObject *args, PyObject *named) {
    PreparedOp *self = (PreparedOp *)object;
    static char *names[] = {"path", "op", "arguments", "general", "done", NULL};
    state *made = PyType_GetModuleState(Py_TYPE(object));
    PyObject *path, *arguments, *general, *done;
    const char *op;
    int number = 1;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OsO!OO", names, &path, &op, &PyTuple_Type, &arguments,
                                     &general, &done))
        return -1;
    while (path != Py_None && number < COLLECTIVES && (!usual[number].name || strcmp(usual[number].name, op)))
        number++;
    if (path != Py_None) {
        if ((PyObject *)Py_TYPE(path) != made->fast_path || number == COLLECTIVES ||
            PyTuple_Size(arguments) != usual[number].arguments) {
            PyErr_SetString(PyExc_TypeError,
                            "expected a fast path, the name of one of its ops, and the arguments of that op");
            return -1;
        }
        self->path = (fast_path *)Py_NewRef(path), self->call.op = (collective)number;
        for (int i = 0; i < usual[number].arguments; i++)
            self->args[i] = Py_NewRef(PyTuple_GetItem(arguments, i));
    }
    self->general = Py_NewRef(general), self->done = Py_NewRef(done);
    return 0;
}

static int is_unchanged(const fast_path *path, const operand *before) {
    dlpack_tensor where;
    uint64_t nbytes;
    return !before->itself || (is_dense(path->known, before->itself, path->device, &where, &nbytes) &&
                               where.data == before->where.data && nbytes == before->nbytes &&
                               (uint64_t)scalar_type(path->known, before->itself) == before->dtype);
}

/* Start on the fast path. 1 if that has completed the op, 0 if it is a general one, -1 with a Python error.
 */
static int start_fast(PreparedOp *self) {
    fast_path *path = self->path;
    fast_call *call = &self->call;
    if (!path)
        return 0;
    /* how the rows of an all_to_all divide is not compared */
    int unchanged = self->checked && call->op != ALL_TO_ALL && is_unchanged(path, &call->tensor) &&
                    is_unchanged(path, &call->output);
    fast_call now = unchanged ? *call : (fast_call){.op = call->op};
    int end = run_call(path, &now, self->args, unchanged);
    Py_CLEAR(now.work);
    self->checked = end == COMPLETED;
    if (self->checked)
        *call = now;
    return end == RAISED ? -1 : end == COMPLETED;
}

static PyObject *prepared_call(PyObject *object, PyObject *args, PyObject *named) {
    PreparedOp *self = (PreparedOp *)object;
    if (!PyTuple_Size(args) && (!named || !PyDict_Size(named))) {
        int done = start_fast(self);
        if (done)
            return done < 0 ? NULL : Py_NewRef(self->done);
    }
    return PyObject_Call(self->general, args, named);
}

static int prepared_traverse(PyObject *object, visitproc visit, void *arg) {
    PreparedOp *self = (PreparedOp *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)self->path);
    for (int i = 0; i < MOST_ARGUMENTS; i++)
        Py_VISIT(self->args[i]);
    Py_VISIT(self->general);
    Py_VISIT(self->done);
    return 0;
}

static int prepared_clear(PyObject *object) {
    PreparedOp *self = (PreparedOp *)object;
    PyObject *path = (PyObject *)self->path;
    self->path = NULL;
    Py_XDECREF(path);
    for (int i = 0; i < MOST_ARGUMENTS; i++)
        Py_CLEAR(self->args[i]);
    Py_CLEAR(self->general);
    Py_CLEAR(self->done);
    return 0;
}

static void prepared_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    prepared_clear(object);
    free_object(object);
}

static PyMethodDef prepared_methods[] = {
    {"start", (PyCFunction)(void (*)(void))prepared_call, METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot prepared_slots[] = {
    {Py_tp_init, prepared_init},
    {Py_tp_dealloc, prepared_dealloc},
    {Py_tp_traverse, prepared_traverse},
    {Py_tp_clear, prepared_clear},
    {Py_tp_call, prepared_call},
    {Py_tp_methods, prepared_methods},
    {0, NULL},
};

PyType_Spec prepared_spec = {
    "holdfast.comms._native.PreparedOp",     sizeof(PreparedOp), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, prepared_slots,
};
