#define PY_SSIZE_T_CLEAN
#include "board/run_op.h"
#include "module.h"

#include <structmember.h>

/* -- creation and release */

/* Set the process id of each rank. An empty tuple means that no rank's memory can be read. */
static int set_pids(Board *self, PyObject *pids) {
    Py_ssize_t count = PyTuple_Size(pids);
    if (count && count != self->b.size) {
        PyErr_SetString(PyExc_ValueError, "pids must have one process for each rank, or none");
        return -1;
    }
    int32_t *all = count ? PyMem_Calloc((size_t)count, sizeof *all) : NULL;
    self->b.pids = all;
    for (Py_ssize_t rank = 0; rank < count && all; rank++)
        all[rank] = (int32_t)PyLong_AsLong(PyTuple_GetItem(pids, rank));
    if (count && !all)
        PyErr_NoMemory();
    return PyErr_Occurred() ? -1 : 0;
}

static int board_init(PyObject *object, PyObject *args, PyObject *named) {
    Board *self = (Board *)object;
    static char *names[] = {"memory", "rank",  "size",  "epoch", "row",   "table",  "places", "slots",
                            "slot",   "stage", "block", "depth", "spins", "yields", "pids",   NULL};
    PyObject *memory, *pids;
    board b = {0};
    unsigned long long epoch;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OiiKKKKKKKKillO!", names, &memory, &b.rank, &b.size,
                                     &epoch, &b.row, &b.table, &b.places, &b.slots, &b.slot, &b.stage,
                                     &b.block, &b.depth, &b.spins, &b.yields, &PyTuple_Type, &pids))
        return -1;
    b.ready = epoch + 1;
    if (b.size < 1 || b.rank < 0 || b.rank >= b.size || b.depth < 1 || !b.block) {
        PyErr_SetString(PyExc_ValueError, "no such rank, or no stage");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0)
        return -1;
    b.base = self->memory.buf, b.nbytes = (size_t)self->memory.len;
    self->b = b;
    self->p.give = PyMem_Calloc((size_t)b.size, sizeof(span));
    self->p.take = PyMem_Calloc((size_t)b.size, sizeof(span));
    if (b.row * (uint64_t)b.size > b.nbytes) {
        PyErr_SetString(PyExc_ValueError, "the memory is smaller than the board");
        return -1;
    }
    if (!self->p.give || !self->p.take) {
        PyErr_NoMemory();
        return -1;
    }
    self->p.b = &self->b;
    return set_pids(self, pids);
}

static PyObject *release(Board *self, PyObject *nothing) {
    (void)nothing;
    self->b.size = 0;
    if (self->memory.obj)
        PyBuffer_Release(&self->memory);
    Py_RETURN_NONE;
}

static void board_dealloc(PyObject *object) {
    Board *self = (Board *)object;
    if (self->memory.obj)
        PyBuffer_Release(&self->memory);
    PyMem_Free(self->p.give);
    PyMem_Free(self->p.take);
    PyMem_Free(self->p.scratch);
    PyMem_Free((void *)self->b.pids);
    free_object(object);
}

/* -- arguments */

static int check_rank(const Board *self, uint64_t rank) {
    if (rank < (uint64_t)self->b.size)
        return 1;
    PyErr_SetString(PyExc_ValueError, self->b.size ? "no such rank" : "the board was released");
    return 0;
}

/* Parse a flat tuple of (address, nbytes) pairs into `spans`; the remaining entries become empty. */
static Py_ssize_t spans_of(PyObject *flat, span *spans, Py_ssize_t most) {
    Py_ssize_t count = PyTuple_Size(flat);
    if (count < 0)
        return -1;
    if (count % 2 || count / 2 > most) {
        PyErr_SetString(PyExc_ValueError, "spans must be (address, size), at most one for each rank");
        return -1;
    }
    memset(spans, 0, (size_t)most * sizeof(span));
    for (Py_ssize_t i = 0; i < count / 2; i++) {
        spans[i].at = PyLong_AsVoidPtr(PyTuple_GetItem(flat, 2 * i));
        spans[i].nbytes = PyLong_AsUnsignedLongLong(PyTuple_GetItem(flat, 2 * i + 1));
        if (PyErr_Occurred() || !is_memory((uintptr_t)spans[i].at, spans[i].nbytes))
            return -1;
    }
    return count / 2;
}

/* -- flags */

static PyObject *board_raise(Board *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[2];
    if (!parse_numbers(args, count, 2, a) || !check_rank(self, 0))
        return NULL;
    raise_flag(&self->b, (int)a[1], a[0]);
    Py_RETURN_NONE;
}

static PyObject *board_is_over(Board *self, PyObject *nothing) {
    (void)nothing;
    return PyBool_FromLong(is_over(&self->b));
}

static PyObject *board_stop(Board *self, PyObject *nothing) {
    (void)nothing;
    atomic_store(&self->b.stopped, 1);
    Py_RETURN_NONE;
}

static PyObject *board_stop_spinning(Board *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[1];
    if (!parse_numbers(args, count, 1, a))
        return NULL;
    atomic_store(&self->b.no_yield_below, a[0]);
    Py_RETURN_NONE;
}

static PyObject *board_wake(Board *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[1];
    if (!parse_numbers(args, count, 1, a) || !check_rank(self, a[0]))
        return NULL;
    atomic_thread_fence(memory_order_seq_cst);
    if (flag_of(&self->b, (int)a[0], ASLEEP))
        futex_wake(&self->b, bit_of((int)a[0]));
    Py_RETURN_NONE;
}

static PyObject *board_wake_all(Board *self, PyObject *nothing) {
    (void)nothing;
    if (self->b.size)
        futex_wake(&self->b, ~(uint32_t)0);
    Py_RETURN_NONE;
}

/* sleep_until(ready): sleep until `ready()`; False after SLEEP_NANOSECONDS, or once the board is over.
 * `ready` may release the board. */
static PyObject *board_sleep_until(Board *self, PyObject *ready) {
    board *b = &self->b;
    uint64_t until = nanoseconds() + SLEEP_NANOSECONDS;
    int done = 0, goes_on = 1;
    while (goes_on && check_rank(self, 0)) {
        prepare_wait(b);
        PyObject *answer = PyObject_CallNoArgs(ready);
        done = answer ? PyObject_IsTrue(answer) : -1;
        Py_XDECREF(answer);
        goes_on = !done && b->size && nanoseconds() < until &&
                  !atomic_load_explicit(&b->stopped, memory_order_relaxed) && !is_over(b);
        if (goes_on) {
            Py_BEGIN_ALLOW_THREADS;
            futex_wait(b, until);
            Py_END_ALLOW_THREADS;
        }
        if (b->size)
            finish_wait(b);
    }
    return done < 0 || PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}

/* -- ops */

/* Why an op is not complete, as Python gets it. */
static PyObject *halted_tuple(const Board *self) {
    const halted *h = &self->halted;
    int rank = h->rank < 0 ? self->b.size : h->rank;
    return Py_BuildValue("iiKK", h->why, rank, (unsigned long long)h->value, (unsigned long long)h->flag);
}

/* run(signature, kind, give, take): see `run_op`. None once the op is complete, else (why, rank, value,
 * flag). */
static PyObject *board_run(Board *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "expected the arguments signature, kind, give and take");
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
    PLAIN("is_over", board_is_over),
    PLAIN("stop", board_stop),
    FAST("stop_spinning", board_stop_spinning),
    FAST("wake", board_wake),
    PLAIN("wake_all", board_wake_all),
    {"sleep_until", (PyCFunction)board_sleep_until, METH_O, NULL},
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

PyType_Spec board_spec = {
    "holdfast.comms._native.Board", sizeof(Board), 0, Py_TPFLAGS_DEFAULT, board_slots,
};
