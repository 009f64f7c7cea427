/* The `Words` type of Python: 8-byte words that other processes or threads change, with the memory order that
 * messages need.
 *
 * A read is an acquire: it happens after all earlier reads of this thread, and before all that follows. A
 * write is a release: it happens after all earlier reads and writes of this thread, and before all its later
 * writes. On x86 both are plain loads and stores. They leave one order open: a write followed by a read of
 * another word. */

#define PY_SSIZE_T_CLEAN
#include "module.h"

#include <stdatomic.h>
#include <stdint.h>

typedef struct {
    PyObject_HEAD Py_buffer memory;
    Py_ssize_t count;
} Words;

static int words_init(PyObject *object, PyObject *args, PyObject *named) {
    Words *self = (Words *)object;
    static char *names[] = {"memory", NULL};
    PyObject *memory;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O", names, &memory))
        return -1;
    if (self->memory.obj) {
        PyErr_SetString(PyExc_ValueError, "these words have their memory already");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0)
        return -1;
    self->count = self->memory.len / 8;
    if ((uintptr_t)self->memory.buf % 8) {
        PyErr_SetString(PyExc_ValueError, "the memory of words must begin at a multiple of 8 bytes");
        return -1;
    }
    return 0;
}

static _Atomic uint64_t *word_at(Words *self, Py_ssize_t index) {
    if (index >= 0 && index < self->count)
        return (_Atomic uint64_t *)self->memory.buf + index;
    PyErr_SetString(PyExc_IndexError, self->count ? "no such word" : "the words were released");
    return NULL;
}

static PyObject *words_load(Words *self, Py_ssize_t index) {
    _Atomic uint64_t *at = word_at(self, index);
    if (!at)
        return NULL;
    atomic_thread_fence(memory_order_acquire);
    return PyLong_FromUnsignedLongLong(atomic_load_explicit(at, memory_order_acquire));
}

static int words_store(Words *self, Py_ssize_t index, PyObject *value) {
    _Atomic uint64_t *at = word_at(self, index);
    if (!at)
        return -1;
    if (!value) {
        PyErr_SetString(PyExc_TypeError, "words cannot be deleted");
        return -1;
    }
    uint64_t number = PyLong_AsUnsignedLongLong(value);
    if (number == (uint64_t)-1 && PyErr_Occurred())
        return -1;
    atomic_store_explicit(at, number, memory_order_release);
    atomic_thread_fence(memory_order_release);
    return 0;
}

static Py_ssize_t words_length(Words *self) { return self->count; }

/* release(): let go of the memory. */
static PyObject *words_release(Words *self, PyObject *nothing) {
    (void)nothing;
    self->count = 0;
    if (self->memory.obj)
        PyBuffer_Release(&self->memory);
    Py_RETURN_NONE;
}

static void words_dealloc(PyObject *object) {
    Words *self = (Words *)object;
    if (self->memory.obj)
        PyBuffer_Release(&self->memory);
    free_object(object);
}

static PyMethodDef words_methods[] = {PLAIN("release", words_release), {NULL, NULL, 0, NULL}};

static PyType_Slot words_slots[] = {
    {Py_tp_init, words_init},
    {Py_tp_dealloc, words_dealloc},
    {Py_tp_methods, words_methods},
    {Py_sq_length, words_length},
    {Py_sq_item, words_load},
    {Py_sq_ass_item, words_store},
    {0, NULL},
};

PyType_Spec words_spec = {"holdfast.comms._native.Words", sizeof(Words), 0, Py_TPFLAGS_DEFAULT, words_slots};
