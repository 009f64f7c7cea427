#define PY_SSIZE_T_CLEAN
#include "calls/when_left.h"

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
