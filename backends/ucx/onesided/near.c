/* holdfast.backends.ucx.onesided._near: a get or a put of libucp in one call from Python, where cffi takes
 * four.
 *
 * libucp.py loads the library and passes the addresses of its functions; nothing here is linked to it. A
 * transfer of a few bytes between processes of one host is complete after one progress call at most: that is
 * tried here, and Python waits for longer ones. Everything that may take more than a few microseconds
 * releases the GIL. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdatomic.h>

#include "../../../comms/native/arguments.h"

typedef intptr_t (*transfer)(void *endpoint, uintptr_t buffer, size_t count, uint64_t remote, void *key,
                             const void *param);

enum { CLOSED = 1, OK = 0 }; /* distinct from requests, which are addresses, and errors, which are negative */
enum { AT_ONCE = 1 << 14 };  /* bytes up to which the GIL is kept */
enum { BLOCK = 1 << 22 };    /* the most bytes of one copy, between two checks of the deadline */

typedef struct {
    PyObject_HEAD transfer get, put;
    unsigned (*progress)(void *worker);
    int8_t (*status)(intptr_t request);
    void (*free)(intptr_t request);
    void *worker;
    const void *param;
} Near;

typedef struct {
    PyObject *near;
} state; /* types of the module */

/* -- the library, and a worker of it */

static int near_init(PyObject *object, PyObject *args, PyObject *named) {
    Near *self = (Near *)object;
    static char *names[] = {"get", "put", "progress", "status", "free", "worker", "param", NULL};
    unsigned long long at[7];
    if (!PyArg_ParseTupleAndKeywords(args, named, "KKKKKKK", names, at, at + 1, at + 2, at + 3, at + 4,
                                     at + 5, at + 6))
        return -1;
    self->get = (transfer)(uintptr_t)at[0], self->put = (transfer)(uintptr_t)at[1];
    self->progress = (unsigned (*)(void *))(uintptr_t)at[2];
    self->status = (int8_t (*)(intptr_t))(uintptr_t)at[3];
    self->free = (void (*)(intptr_t))(uintptr_t)at[4];
    self->worker = (void *)(uintptr_t)at[5], self->param = (const void *)(uintptr_t)at[6];
    return 0;
}

static void near_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    freefunc free_ = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_(object);
    Py_DECREF(type);
}

static PyType_Slot near_slots[] = {
    {Py_tp_init, near_init},
    {Py_tp_dealloc, near_dealloc},
    {0, NULL},
};

static PyType_Spec near_spec = {"holdfast.backends.ucx._near.Near", sizeof(Near), 0, Py_TPFLAGS_DEFAULT,
                                near_slots};

/* -- the memory of one rank */

typedef struct {
    PyObject_HEAD Near *near;
    void *endpoint, *key;
    uint64_t memory;
    _Atomic uint64_t *closed, *busy; /* words: it has closed its window; this rank writes into it */
} Part;

/* OK if done, else a request that is under way, or a negative status. */
static intptr_t attempt(const Part *self, transfer function, uint64_t address, uint64_t nbytes,
                        uint64_t offset) {
    const Near *near = self->near;
    intptr_t request =
        function(self->endpoint, address, nbytes, self->memory + offset, self->key, near->param);
    if (request <= 0)
        return request;
    near->progress(near->worker);
    if (near->status(request) != OK)
        return request;
    near->free(request);
    return OK;
}

/* get(address, nbytes, offset): the first block of the transfer. */
static intptr_t transfer_block(const Part *self, transfer function, const uint64_t *a) {
    uint64_t nbytes = a[1] < BLOCK ? a[1] : BLOCK;
    if (nbytes <= AT_ONCE)
        return attempt(self, function, a[0], nbytes, a[2]);
    intptr_t outcome;
    Py_BEGIN_ALLOW_THREADS;
    outcome = attempt(self, function, a[0], nbytes, a[2]);
    Py_END_ALLOW_THREADS;
    return outcome;
}

static PyObject *part_get(Part *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[3];
    return parse_numbers(args, count, 3, a) && is_memory(a[0], a[1])
               ? PyLong_FromSsize_t(transfer_block(self, self->near->get, a))
               : NULL;
}

/* put: sets `busy` before the write and clears it after. A rank that closes its window sets `closed` before
 * it reads the `busy` words, so one of the two sees the other. */
static PyObject *part_put(Part *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[3];
    if (!parse_numbers(args, count, 3, a) || !is_memory(a[0], a[1]))
        return NULL;
    atomic_store(self->busy, 1);
    intptr_t outcome = atomic_load(self->closed) ? CLOSED : transfer_block(self, self->near->put, a);
    if (outcome == OK || outcome == CLOSED)
        atomic_store_explicit(self->busy, 0, memory_order_release);
    return PyLong_FromSsize_t(outcome);
}

/* put_entered: for a caller that has set `busy` itself. */
static PyObject *part_put_entered(Part *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[3];
    if (!parse_numbers(args, count, 3, a) || !is_memory(a[0], a[1]))
        return NULL;
    return PyLong_FromSsize_t(atomic_load(self->closed) ? CLOSED : transfer_block(self, self->near->put, a));
}

static int part_init(PyObject *object, PyObject *args, PyObject *named) {
    Part *self = (Part *)object;
    static char *names[] = {"near", "endpoint", "memory", "key", "closed", "busy", NULL};
    PyObject *near;
    unsigned long long at[5];
    if (!PyArg_ParseTupleAndKeywords(args, named, "OKKKKK", names, &near, at, at + 1, at + 2, at + 3, at + 4))
        return -1;
    state *made = PyType_GetModuleState(Py_TYPE(object));
    int right = PyObject_IsInstance(near, made->near);
    if (right <= 0) {
        if (!right)
            PyErr_SetString(PyExc_TypeError, "expected a Near");
        return -1;
    }
    self->near = (Near *)Py_NewRef(near);
    self->endpoint = (void *)(uintptr_t)at[0], self->memory = at[1], self->key = (void *)(uintptr_t)at[2];
    self->closed = (_Atomic uint64_t *)(uintptr_t)at[3], self->busy = (_Atomic uint64_t *)(uintptr_t)at[4];
    return 0;
}

static void part_dealloc(PyObject *object) {
    Py_XDECREF((PyObject *)((Part *)object)->near);
    near_dealloc(object);
}

static PyMethodDef part_methods[] = {
    FAST("get", part_get),
    FAST("put", part_put),
    FAST("put_entered", part_put_entered),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot part_slots[] = {
    {Py_tp_init, part_init},
    {Py_tp_dealloc, part_dealloc},
    {Py_tp_methods, part_methods},
    {0, NULL},
};

static PyType_Spec part_spec = {"holdfast.backends.ucx._near.NearPart", sizeof(Part), 0, Py_TPFLAGS_DEFAULT,
                                part_slots};

static int module_exec(PyObject *module) {
    state *made = PyModule_GetState(module);
    made->near = PyType_FromSpec(&near_spec);
    PyObject *part = made->near ? PyType_FromModuleAndSpec(module, &part_spec, NULL) : NULL;
    int failed = !part || PyModule_AddObjectRef(module, "Near", made->near) ||
                 PyModule_AddObjectRef(module, "NearPart", part) ||
                 PyModule_AddIntConstant(module, "CLOSED", CLOSED) ||
                 PyModule_AddIntConstant(module, "BLOCK", BLOCK);
    Py_XDECREF(part);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_near", NULL, sizeof(state), NULL, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__near(void) { return PyModuleDef_Init(&definition); }
