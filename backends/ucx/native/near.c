/* holdfast.backends.ucx._near: a get or a put of libucp in one call from Python, where cffi takes four.
 *
 * The library is loaded by libucp.py, which hands over the addresses of its functions; nothing here is linked to it. A
 * transfer of a few bytes between processes of one host is done when the library returns, but for one look: so that is
 * tried here, and what takes longer is left to Python. Whatever may take more than a few microseconds lets go of the GIL. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdatomic.h>

#include "../../../comms/native/numbers.h"

typedef intptr_t (*transfer)(void *endpoint, uintptr_t buffer, size_t count, uint64_t remote, void *key, const void *param);

enum { CLOSED = 1, OK = 0 }; /* beside requests, which are addresses, and errors, which are negative */
enum { AT_ONCE = 1 << 14 };  /* bytes up to which the GIL is kept */

typedef struct {
    PyObject_HEAD
    transfer get, put;
    unsigned (*progress)(void *worker);
    int8_t (*status)(intptr_t request);
    void (*free)(intptr_t request);
    void *worker;
    const void *param;
} Near;

static int near_init(PyObject *object, PyObject *args, PyObject *named) {
    Near *self = (Near *)object;
    static char *names[] = {"get", "put", "progress", "status", "free", "worker", "param", NULL};
    unsigned long long at[7];
    if (!PyArg_ParseTupleAndKeywords(args, named, "KKKKKKK", names, at, at + 1, at + 2, at + 3, at + 4, at + 5, at + 6))
        return -1;
    self->get = (transfer)(uintptr_t)at[0], self->put = (transfer)(uintptr_t)at[1];
    self->progress = (unsigned (*)(void *))(uintptr_t)at[2];
    self->status = (int8_t(*)(intptr_t))(uintptr_t)at[3];
    self->free = (void (*)(intptr_t))(uintptr_t)at[4];
    self->worker = (void *)(uintptr_t)at[5], self->param = (const void *)(uintptr_t)at[6];
    return 0;
}

/* endpoint, address, nbytes, remote, key: OK if done, else a request that is under way, or a negative status. */
static intptr_t attempt(const Near *self, transfer function, const uint64_t *a) {
    intptr_t request = function((void *)(uintptr_t)a[0], (uintptr_t)a[1], (size_t)a[2], a[3], (void *)(uintptr_t)a[4], self->param);
    if (request <= 0)
        return request;
    self->progress(self->worker);
    if (self->status(request) != OK)
        return request;
    self->free(request);
    return OK;
}

static intptr_t run(const Near *self, transfer function, const uint64_t *a) {
    if (a[2] <= AT_ONCE)
        return attempt(self, function, a);
    intptr_t outcome;
    Py_BEGIN_ALLOW_THREADS;
    outcome = attempt(self, function, a);
    Py_END_ALLOW_THREADS;
    return outcome;
}

/* get(endpoint, address, nbytes, remote, key) */
static PyObject *near_get(Near *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[5];
    return numbers(args, count, 5, a) ? PyLong_FromSsize_t(run(self, self->get, a)) : NULL;
}

/* put(endpoint, address, nbytes, remote, key, busy, closed): with the word `busy` at 1 from here on, which says that this rank
 * writes; if the word `closed` is 0 then, else CLOSED. */
static PyObject *near_put(Near *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[7];
    if (!numbers(args, count, 7, a))
        return NULL;
    atomic_store((_Atomic uint64_t *)(uintptr_t)a[5], 1);
    intptr_t outcome = atomic_load((_Atomic uint64_t *)(uintptr_t)a[6]) ? CLOSED : run(self, self->put, a);
    return PyLong_FromSsize_t(outcome);
}

static void near_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    freefunc free_ = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_(object);
    Py_DECREF(type);
}

static PyMethodDef near_methods[] = {FAST("get", near_get), FAST("put", near_put), {NULL, NULL, 0, NULL}};

static PyType_Slot near_slots[] = {
    {Py_tp_init, near_init},
    {Py_tp_dealloc, near_dealloc},
    {Py_tp_methods, near_methods},
    {0, NULL},
};

static PyType_Spec near_spec = {"holdfast.backends.ucx._near.Near", sizeof(Near), 0, Py_TPFLAGS_DEFAULT, near_slots};

static int module_exec(PyObject *module) {
    PyObject *type = PyType_FromSpec(&near_spec);
    if (!type)
        return -1;
    int failed = PyModule_AddObjectRef(module, "Near", type) || PyModule_AddIntConstant(module, "CLOSED", CLOSED);
    Py_DECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_near", NULL, 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__near(void) { return PyModuleDef_Init(&definition); }
