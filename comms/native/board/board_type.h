/* The methods of `Board` that run ops, small and large. */

#ifndef HOLDFAST_BOARD_TYPE_H
#define HOLDFAST_BOARD_TYPE_H

#include <structmember.h>

#include "board/board_object.h"

/* -- small ops */

enum { EARLY = -1, FAILED = -2, ALIKE = -1, LATE = -2 };
enum { COPIED = 1, NOT_MET = 2, DONE = 4 }; /* progress of an op in one call */

/* Signatures hold the number of the op in 4 bits and the root in 12, as signature.py packs them. */
enum { ROOT_BIT = 15, ROOT_MASK = 0xFFF, ROOTED = 1 << 2 | 1 << 3 | 1 << 7 | 1 << 8 };

/* The signature with a digest of the roots of all ops so far, this one included, in place of its root. A root that has
 * copied its input does not wait for the other ranks, so ranks that name different roots may not meet in that op; the
 * next op in which they meet finds that their digests differ. */
static uint64_t with_roots(Board *self, uint64_t signature) {
    self->roots_before = self->roots;
    if (ROOTED >> (signature & 15) & 1)
        self->roots = (5 * self->roots + (signature >> ROOT_BIT) + 1) & ROOT_MASK;
    return (signature & ~((uint64_t)ROOT_MASK << ROOT_BIT)) | self->roots << ROOT_BIT;
}

/* Publish the `count` inputs in `p.give`. Returns 1 if they were copied, 0 if they are too large, EARLY if a rank
 * still reads what their slot holds, FAILED with a Python error. An op that was begun already is only checked to be
 * the same. */
static int publish_(Board *self, uint64_t op, uint64_t signature, Py_ssize_t count) {
    const char *from = count ? self->p.give->at : NULL;
    if (op == self->begun) {
        if (signature == self->signature && from == self->from)
            return self->copied;
        PyErr_SetString(PyExc_RuntimeError, "another op was begun here, and never ended");
        return FAILED;
    }
    if (op > 2 && self->b.all_finished < op - 2 && wait_for(self, -1, FLAG, 4 * (op - 2) + 3) >= 0)
        return EARLY;
    self->from = from, self->signature = signature;
    return self->copied = publish(&self->b, op, with_roots(self, signature), self->p.give, (int)count);
}

/* Wait until all ranks have published. Returns ALIKE if all published the same op, LATE if that takes long, else a
 * rank that published another op. */
static int match_all(Board *self, uint64_t op, int how) {
    board *b = &self->b;
    if (wait_for(self, -1, how, op) >= 0)
        return LATE;
    b->all_finished = op - 1;
    for (int rank = 0; rank < b->size; rank++)
        if (!has_same_op(b, rank, op))
            return rank;
    return ALIKE;
}

/* After `publish_`: whether all ranks have published the same op. */
static int all_match(Board *self, uint64_t op, int copied) {
    int how = copied && line_of(&self->b, self->b.rank, op) ? PUBLISHED_ON_LINE : PUBLISHED;
    return match_all(self, op, how) == ALIKE;
}

static int finish(Board *self, uint64_t op, int copied) {
    raise_flag(&self->b, FLAG, 4 * op + 3);
    return copied | DONE;
}

/* Copy, without the GIL from 16 KiB on. */
static void move(span into, const void *from) {
    if (!into.nbytes || into.at == from)
        return;
    if (into.nbytes <= 1 << 14) {
        copy_bytes(into.at, from, into.nbytes);
        return;
    }
    Py_BEGIN_ALLOW_THREADS;
    copy_bytes(into.at, from, into.nbytes);
    Py_END_ALLOW_THREADS;
}

/* A whole move: `publish_`, copy what this rank keeps from `own`, match all ranks, collect input `index` of the
 * others, finish. Returns what `publish_` returns, plus NOT_MET or DONE. */
static int exchange_all(Board *self, uint64_t op, uint64_t signature, Py_ssize_t count, const span *into, uint64_t index,
                    const void *own) {
    int copied = publish_(self, op, signature, count);
    if (copied < 0)
        return copied;
    if (into)
        move(into[self->b.rank], own);
    if (!all_match(self, op, copied))
        return copied | NOT_MET;
    return collect(&self->b, op, index, into) == TAKEN_ALL ? finish(self, op, copied) : copied;
}

/* A whole reduction: `publish_`, match all ranks, reduce input `index` of all, finish. Returns like `exchange_all`. */
static int reduce_all(Board *self, uint64_t op, uint64_t signature, Py_ssize_t count, uint64_t index, long kind, span into) {
    int copied = publish_(self, op, signature, count);
    if (copied < 0)
        return copied;
    if (!all_match(self, op, copied))
        return copied | NOT_MET;
    if (collect(&self->b, op, 0, NULL) != TAKEN_ALL || reduce_inputs(&self->b, op, index, kind, into) != TAKEN_ALL)
        return copied;
    return finish(self, op, copied);
}

static PyObject *outcome(int of) { return of == FAILED ? NULL : PyLong_FromLong(of); }

/* next(): the number of the next op. */
static PyObject *board_next(Board *self, PyObject *nothing) {
    (void)nothing;
    return PyLong_FromUnsignedLongLong(++self->number);
}

/* publish(op, signature, inputs): 1 if the inputs were copied, 0 if they are too large, -1 if it is too early. */
static PyObject *board_publish(Board *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[2];
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "op, signature and inputs are needed");
        return NULL;
    }
    if (!parse_numbers(args, 2, 2, a) || !check_rank(self, 0))
        return NULL;
    Py_ssize_t inputs = spans_of(args[2], self->p.give, self->b.size);
    return inputs < 0 ? NULL : outcome(publish_(self, a[0], a[1], inputs));
}

/* exchange(op, signature, inputs, into, index, own): see `exchange_all`; -1 if it is too early. */
static PyObject *board_exchange(Board *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[2], b[2];
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "op, signature, inputs, into, index and own are needed");
        return NULL;
    }
    if (!parse_numbers(args, 2, 2, a) || !parse_numbers(args + 4, 2, 2, b) || !check_rank(self, 0) || !check_rank(self, b[0]))
        return NULL;
    Py_ssize_t inputs = spans_of(args[2], self->p.give, self->b.size);
    Py_ssize_t places = spans_of(args[3], self->p.take, self->b.size);
    if (inputs < 0 || places < 0 || (places && !is_memory(b[1], self->p.take[self->b.rank].nbytes)))
        return NULL;
    return outcome(exchange_all(self, a[0], a[1], inputs, places ? self->p.take : NULL, b[0], (const void *)(uintptr_t)b[1]));
}

/* reduce(op, signature, inputs, index, kind, into, nbytes): see `reduce_all`; -1 if it is too early. */
static PyObject *board_reduce(Board *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[2], b[4];
    if (count != 7) {
        PyErr_SetString(PyExc_TypeError, "op, signature, inputs, index, kind, into and nbytes are needed");
        return NULL;
    }
    if (!parse_numbers(args, 2, 2, a) || !parse_numbers(args + 3, 4, 4, b) || !check_rank(self, 0) ||
        !check_rank(self, b[0]) || !is_memory(b[2], b[3]))
        return NULL;
    if (!kernel_of((long)b[1])) {
        PyErr_SetString(PyExc_ValueError, "no such reduction");
        return NULL;
    }
    Py_ssize_t inputs = spans_of(args[2], self->p.give, self->b.size);
    span into = {(char *)(uintptr_t)b[2], b[3]};
    return inputs < 0 ? NULL : outcome(reduce_all(self, a[0], a[1], inputs, b[0], (long)b[1], into));
}

/* match(rank, op) and match_all(op): -1 once the same op is published, -2 if that takes long, else a rank that
 * published another op. */
static PyObject *board_match(Board *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[2];
    if (!parse_numbers(args, count, 2, a) || !check_rank(self, a[0]))
        return NULL;
    if (wait_for(self, (int)a[0], PUBLISHED, a[1]) >= 0)
        return PyLong_FromLong(LATE);
    return PyLong_FromLong(has_same_op(&self->b, (int)a[0], a[1]) ? ALIKE : (long)a[0]);
}

static PyObject *board_match_all(Board *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[1];
    if (!parse_numbers(args, count, 1, a) || !check_rank(self, 0))
        return NULL;
    return PyLong_FromLong(match_all(self, a[0], PUBLISHED));
}

static int has_input(const Board *self, uint64_t rank, uint64_t index) {
    return check_rank(self, rank) && check_rank(self, index);
}

/* input(rank, op, index): (nbytes, whether the slot holds it). */
static PyObject *board_input(Board *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[3], nbytes;
    if (!parse_numbers(args, count, 3, a) || !has_input(self, a[0], a[2]))
        return NULL;
    const char *at = input(&self->b, (int)a[0], a[1], a[2], &nbytes);
    return Py_BuildValue("KO", (unsigned long long)nbytes, at ? Py_True : Py_False);
}

/* fetch(rank, op, index, into, nbytes): copy an input out of its slot. -1 if done, else the actual size of the input. */
static PyObject *board_fetch(Board *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[5], nbytes;
    if (!parse_numbers(args, count, 5, a) || !has_input(self, a[0], a[2]) || !is_memory(a[3], a[4]))
        return NULL;
    const char *at = input(&self->b, (int)a[0], a[1], a[2], &nbytes);
    if (!at || nbytes != a[4])
        return PyLong_FromUnsignedLongLong(nbytes);
    probe_large_input(&self->b, (int)a[0], nbytes);
    copy_bytes((void *)(uintptr_t)a[3], at, nbytes);
    publish_locality(&self->b);
    return PyLong_FromLong(-1);
}

/* collect(op, index, into): copy an input of every other rank out of its slot. `into` has (address, nbytes) for each
 * rank; if it is empty, nothing is copied. -1 if done, -2 if slots do not hold all inputs, else a rank with an input of
 * another size. */
static PyObject *board_collect(Board *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[2];
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "op, index and into are needed");
        return NULL;
    }
    if (!parse_numbers(args, 2, 2, a) || !has_input(self, 0, a[1]))
        return NULL;
    Py_ssize_t places = spans_of(args[2], self->p.take, self->b.size);
    return places < 0 ? NULL : PyLong_FromLong(collect(&self->b, a[0], a[1], places ? self->p.take : NULL));
}

/* combine(op, index, kind, into, nbytes): reduce that input of all ranks, in rank order. -1 if done, else a rank with
 * an input of another size. */
static PyObject *board_combine(Board *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t a[5];
    if (!parse_numbers(args, count, 5, a) || !has_input(self, 0, a[1]) || !is_memory(a[3], a[4]))
        return NULL;
    if (!kernel_of((long)a[2])) {
        PyErr_SetString(PyExc_ValueError, "no such reduction");
        return NULL;
    }
    span into = {(char *)(uintptr_t)a[3], a[4]};
    return PyLong_FromLong(reduce_inputs(&self->b, a[0], a[1], (long)a[2], into));
}

/* -- large ops */

/* Set up a pipeline (see pipeline.h) over `p.give` and `p.take`; kind -1 is a move. 0 with a Python error. */
static int begin_pipeline(Board *self, uint64_t op, uint64_t longest, long kind, int reduces_all, int shared,
                          const char *own) {
    pipeline *p = &self->p;
    if (kind >= 0 && !p->scratch && !(p->scratch = PyMem_Malloc(self->b.block))) {
        PyErr_NoMemory();
        return 0;
    }
    p->own = own;
    p->combine = kind >= 0 ? kernel_of(kind) : NULL;
    p->itemsize = kind >= 0 ? itemsize_of(kind) : 1;
    p->reduces_all = reduces_all, p->shared = shared;
    start_pipeline(p, op, longest);
    return 1;
}

static int run_without_gil(Board *self) {
    int done;
    Py_BEGIN_ALLOW_THREADS;
    done = run_pipeline(&self->p);
    Py_END_ALLOW_THREADS;
    return done;
}

/* begin(op, longest, kind, reduces_all, shared, give, take, own): see `begin_pipeline`; does nothing if this op is
 * already under way. */
static PyObject *board_begin(Board *self, PyObject *args) {
    pipeline *p = &self->p;
    unsigned long long op, longest, own;
    long kind;
    int reduces_all, shared;
    PyObject *give_, *take_;
    if (!PyArg_ParseTuple(args, "KKlppO!O!K", &op, &longest, &kind, &reduces_all, &shared, &PyTuple_Type, &give_,
                          &PyTuple_Type, &take_, &own) ||
        !check_rank(self, 0))
        return NULL;
    if (kind >= 0 && !kernel_of(kind)) {
        PyErr_SetString(PyExc_ValueError, "no such reduction");
        return NULL;
    }
    if (spans_of(give_, p->give, self->b.size) < 0 || spans_of(take_, p->take, self->b.size) < 0)
        return NULL;
    if (p->op != op && !begin_pipeline(self, op, longest, kind, reduces_all, shared, (const char *)(uintptr_t)own))
        return NULL;
    Py_RETURN_NONE;
}

/* run(): None once the op is complete; (rank, value, flag) if it still waits for that flag; (rank, error number, -1)
 * if the memory of `rank` cannot be read. */
static PyObject *board_run(Board *self, PyObject *nothing) {
    (void)nothing;
    if (!check_rank(self, 0))
        return NULL;
    if (run_without_gil(self))
        Py_RETURN_NONE;
    if (self->p.unreadable)
        return Py_BuildValue("iii", self->p.awaited, self->p.unreadable, -1);
    return Py_BuildValue("iKi", self->p.awaited, (unsigned long long)self->p.value, self->p.flag);
}

static PyMethodDef board_methods[] = {
    FAST("raise_flag", board_raise),
    FAST("sleep_wait", board_sleep_wait),
    PLAIN("is_over", board_is_over),
    PLAIN("stop", board_stop),
    FAST("stop_spinning", board_stop_spinning),
    FAST("wake", board_wake),
    PLAIN("wake_all", board_wake_all),
    PLAIN("prepare_wait", board_prepare_wait),
    PLAIN("futex_wait", board_futex_wait),
    PLAIN("finish_wait", board_finish_wait),
    PLAIN("yield_cpu", board_yield_cpu),
    PLAIN("next", board_next),
    FAST("publish", board_publish),
    FAST("exchange", board_exchange),
    FAST("reduce", board_reduce),
    FAST("match", board_match),
    FAST("match_all", board_match_all),
    FAST("input", board_input),
    FAST("fetch", board_fetch),
    FAST("collect", board_collect),
    FAST("combine", board_combine),
    {"begin", (PyCFunction)board_begin, METH_VARARGS, NULL},
    PLAIN("run", board_run),
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

static PyType_Spec board_spec = {
    "holdfast.comms._native.Board", sizeof(Board), 0, Py_TPFLAGS_DEFAULT, board_slots,
};

#endif
