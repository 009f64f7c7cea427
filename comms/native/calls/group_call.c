#define PY_SSIZE_T_CLEAN
#include "calls/group_call.h"

static int group_call_init(PyObject *object, PyObject *args, PyObject *named) {
    GroupCall *self = (GroupCall *)object;
    static char *names[] = {"holder", "group", "op", "options", "limit", "failed", NULL};
    PyObject *holder, *group, *op, *options, *limit, *failed;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OUUOOO", names, &holder, &group, &op, &options, &limit,
                                     &failed))
        return -1;
    self->holder = Py_NewRef(holder), self->group = Py_NewRef(group), self->op = Py_NewRef(op);
    self->options = Py_NewRef(options), self->limit = Py_NewRef(limit), self->failed = Py_NewRef(failed);
    self->wait = PyUnicode_InternFromString("wait");
    return self->wait ? 0 : -1;
}

/* Pass a RuntimeError to `failed(work, error, deadline)` and return its result; other errors stay set. */
static PyObject *report_failure(GroupCall *self, PyObject *work, PyObject *deadline) {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
        return NULL;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    PyObject *result =
        PyObject_CallFunctionObjArgs(self->failed, work ? work : Py_None, error, deadline, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return result;
}

/* call(tensor, deadline) */
static PyObject *group_call(PyObject *object, PyObject *args, PyObject *named) {
    GroupCall *self = (GroupCall *)object;
    PyObject *tensor, *deadline, *work = NULL, *done = NULL;
    (void)named;
    if (!PyArg_UnpackTuple(args, "GroupCall", 2, 2, &tensor, &deadline))
        return NULL;
    PyObject *tensors = PyList_New(1), *group = PyObject_GetAttr(self->holder, self->group);
    if (tensors && group) {
        PyList_SetItem(tensors, 0, Py_NewRef(tensor));
        work = PyObject_CallMethodObjArgs(group, self->op, tensors, self->options, NULL);
        done = work && work != Py_None ? PyObject_CallMethodObjArgs(work, self->wait, self->limit, NULL)
                                       : Py_XNewRef(work);
        if (!done)
            done = report_failure(self, work, deadline);
    }
    Py_XDECREF(tensors);
    Py_XDECREF(group);
    Py_XDECREF(work);
    Py_XDECREF(done);
    return done ? Py_NewRef(Py_None) : NULL;
}

static void group_call_dealloc(PyObject *object) {
    GroupCall *self = (GroupCall *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *held[] = {self->holder, self->group,  self->op,  self->options,
                        self->limit,  self->failed, self->wait};
    for (int i = 0; i < 7; i++)
        Py_XDECREF(held[i]);
    freefunc free_ = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_(object);
    Py_DECREF(type);
}

static PyType_Slot group_call_slots[] = {
    {Py_tp_init, group_call_init},
    {Py_tp_dealloc, group_call_dealloc},
    {Py_tp_call, group_call},
    {0, NULL},
};

PyType_Spec group_call_spec = {
    "holdfast.comms._native.GroupCall", sizeof(GroupCall), 0, Py_TPFLAGS_DEFAULT, group_call_slots,
};
