/* Fast paths: usual ops, from the tensors to the result, in one call from Python.
 *
 * Usual means: plain tensors, matching sizes, and no other op before, around or behind. All else takes the slow path,
 * which runs or refuses it. What an op needs (its signature and kernel, or a function) is asked of Python once and
 * cached. `run`, which differs by type (board_path.h, call_path.h), carries the op out. */

#ifndef HOLDFAST_FAST_PATH_H
#define HOLDFAST_FAST_PATH_H

#include "calls/order.h"
#include "tensors.h"

typedef enum { ALL_REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, ALL_TO_ALL, BARRIER } fast_op;
static const char *const fast_ops[] = {"all_reduce", "reduce_scatter_single", "broadcast", "all_gather_single",
                                       "all_to_all_single", "barrier"};
static const int operand_counts[] = {2, 3, 2, 2, 2, 0}; /* with the reduction or the root, which is the last one */

enum { PLANS = 64 };
/* Results: nothing was done; the op is complete; the slow path has to complete it; a Python error is set. */
enum { DECLINED, COMPLETED, STARTED, RAISED };

typedef struct {
    uint64_t what, count, root; /* the op, and the dtype as torch calls it; number of elements */
    PyObject *reduction, *detail, *answer; /* detail: for the journal; answer: None if the op is not for a fast path */
    unsigned long long signature;
    long kind;
} plan;

typedef struct {
    PyObject *itself;
    dlpack_tensor where;
    uint64_t nbytes, count, dtype;
} operand;

typedef struct {
    fast_op op;
    operand tensor, output; /* as far as the op has them */
    long src;
    const plan *as;
} fast_call;

typedef struct fast_path {
    PyObject_HEAD
    Order *order;
    PyObject *planner;                /* called for plans */
    PyObject *observers, *observed; /* `observers.observed` tells whether any observer watches ops */
    PyObject *enter, *leave;        /* of the journal, or NULL */
    PyObject *names[BARRIER + 1];
    const tensors *known;
    dlpack_device device; /* of the tensors */
    int rank, size;
    int (*parse)(plan *);
    int (*run)(struct fast_path *, fast_call *);
    plan plans[PLANS];
} fast_path;

/* -- usual tensors */

static int is_plain_operand(const fast_path *self, PyObject *tensor, operand *into) {
    if (!is_plain(self->known, tensor, self->device, &into->where, &into->nbytes) || !into->where.bits || !into->where.lanes)
        return 0;
    int32_t dtype = scalar_type(self->known, tensor);
    if (dtype < 0)
        return 0;
    into->itself = tensor, into->dtype = (uint64_t)dtype;
    into->count = into->nbytes * 8 / ((uint64_t)into->where.bits * into->where.lanes);
    return 1;
}

static int are_plain_operands(const fast_path *self, PyObject *const *args, fast_call *call) {
    return is_plain_operand(self, args[0], &call->output) && is_plain_operand(self, args[1], &call->tensor) &&
           call->output.dtype == call->tensor.dtype;
}

/* Whether an op may use both tensors directly: they share no memory, or the smaller one is `part` of the larger one. */
static int overlap_is_allowed(const fast_call *call, const char *part, const operand *smaller) {
    const operand *tensor = &call->tensor, *output = &call->output;
    return tensor->where.data + tensor->nbytes <= output->where.data ||
           output->where.data + output->nbytes <= tensor->where.data || (smaller && part == smaller->where.data);
}

static int divides(const operand *rows, int size) { return rows->where.ndim && rows->where.shape[0] % size == 0; }

/* -- plans */

/* What ranks must agree on beside the tensors, in the words of the slow path, for the journal. */
static PyObject *detail_of(fast_op op, PyObject *tensor, uint64_t root, PyObject *reduction) {
    switch (op) {
    case ALL_REDUCE:
    case REDUCE_SCATTER:
        return PyObject_GetAttrString(reduction, "name");
    case BROADCAST:
        return PyUnicode_FromFormat("from %lu", (unsigned long)root);
    case ALL_TO_ALL:
        return PyObject_GetAttrString(tensor, "dtype");
    default:
        return Py_NewRef(Py_None);
    }
}

/* Ask Python for a plan and cache it. 0, or -1 with a Python error. */
static int fetch_plan(fast_path *self, plan *at, fast_op op, PyObject *tensor, uint64_t root, PyObject *reduction) {
    at->what = 0;
    PyObject *answer = PyObject_CallFunction(self->planner, "OOKO", self->names[op], tensor ? tensor : Py_None,
                                           (unsigned long long)root, reduction ? reduction : Py_None);
    PyObject *replaced[] = {at->answer, at->detail, at->reduction};
    at->detail = answer && answer != Py_None ? detail_of(op, tensor, root, reduction) : NULL;
    at->answer = answer, at->reduction = reduction ? Py_NewRef(reduction) : NULL;
    for (int i = 0; i < 3; i++)
        Py_XDECREF(replaced[i]);
    if (!answer || answer == Py_None)
        return answer ? 0 : -1;
    return at->detail && (!self->parse || self->parse(at) == 0) ? 0 : -1;
}

/* The plan of an op; NULL if it is not for a fast path, or with a Python error. */
static const plan *planned(fast_path *self, fast_op op, const operand *of, uint64_t root, PyObject *reduction) {
    uint64_t what = (uint64_t)(op + 1) << 32 | (of ? of->dtype : 0), count = of ? of->count : 0;
    uint64_t mixed = (what ^ count << 7 ^ root << 20 ^ (uintptr_t)reduction >> 4) * 0x9E3779B97F4A7C15u;
    plan *at = &self->plans[mixed >> 58];
    if (at->what != what || at->count != count || at->root != root || at->reduction != reduction) {
        if (fetch_plan(self, at, op, of ? of->itself : NULL, root, reduction) < 0)
            return NULL;
        at->what = what, at->count = count, at->root = root;
    }
    return at->answer == Py_None ? NULL : at;
}

/* -- the journal: -1 with a Python error */

static int enter_journal(const fast_path *self, const fast_call *call) {
    if (!self->enter)
        return 0;
    const operand *about = call->op == REDUCE_SCATTER ? &call->output : &call->tensor;
    PyObject *tensor = about->itself && call->op != ALL_TO_ALL ? about->itself : Py_None;
    PyObject *seq = PyLong_FromUnsignedLongLong(self->order->seq + 1), *nbytes = PyLong_FromUnsignedLongLong(about->nbytes);
    PyObject *peer = PyLong_FromLong(call->op == BROADCAST ? call->src : -1), *answer = NULL;
    if (seq && nbytes && peer)
        answer = PyObject_CallFunctionObjArgs(self->enter, self->names[call->op], seq, nbytes, tensor, call->as->detail, peer,
                                            NULL);
    PyObject *made[] = {seq, nbytes, peer, answer};
    for (int i = 0; i < 4; i++)
        Py_XDECREF(made[i]);
    return answer ? 0 : -1;
}

static int leave_journal(const fast_path *self, PyObject *error) {
    PyObject *answer = self->leave ? PyObject_CallFunctionObjArgs(self->leave, error, NULL) : Py_NewRef(Py_None);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

/* -- the ops */

/* Whether the op may use these arguments as they are; fills `call`. */
static int are_usual(fast_path *self, PyObject *const *args, fast_call *call) {
    operand *tensor = &call->tensor, *output = &call->output;
    uint64_t size = (uint64_t)self->size, rank = (uint64_t)self->rank;
    switch (call->op) {
    case ALL_REDUCE:
        return is_plain_operand(self, args[0], tensor);
    case REDUCE_SCATTER:
        return are_plain_operands(self, args, call) && tensor->count == output->count * size &&
               overlap_is_allowed(call, tensor->where.data + rank * output->nbytes, output);
    case BROADCAST:
        call->src = PyLong_CheckExact(args[1]) ? PyLong_AsLong(args[1]) : -1;
        if (call->src == -1)
            PyErr_Clear(); /* it does not fit into a long */
        return call->src >= 0 && call->src < self->size && is_plain_operand(self, args[0], tensor);
    case ALL_GATHER:
        return are_plain_operands(self, args, call) && output->count == tensor->count * size &&
               overlap_is_allowed(call, output->where.data + rank * tensor->nbytes, tensor);
    case ALL_TO_ALL:
        return are_plain_operands(self, args, call) && output->count == tensor->count &&
               overlap_is_allowed(call, NULL, NULL) && divides(output, self->size) && divides(tensor, self->size);
    default:
        return 1;
    }
}

static int find_plan(fast_path *self, PyObject *const *args, fast_call *call) {
    int reduces = call->op == ALL_REDUCE || call->op == REDUCE_SCATTER;
    PyObject *reduction = reduces ? args[operand_counts[call->op] - 1] : NULL;
    call->as = planned(self, call->op, call->op == BARRIER ? NULL : &call->tensor, (uint64_t)call->src, reduction);
    return call->as != NULL;
}

/* 1; 0 if the op is not for a fast path, or with a Python error: no byte has moved. */
static int plan_call(fast_path *self, PyObject *const *args, fast_call *call) {
    return are_usual(self, args, call) && find_plan(self, args, call);
}

static int is_open(const fast_path *self) {
    const Order *order = self->order;
    return !order->busy && !order->over && !order->queued && is_false(PyObject_GetAttr(self->observers, self->observed));
}

/* Run an op of these arguments; if `unchanged`, `call` holds what was found out about them before. */
static int run_call(fast_path *self, fast_call *call, PyObject *const *args, int unchanged) {
    Order *order = self->order;
    unsigned long here = PyThread_get_thread_ident();
    if (!is_open(self)) {
        order->lost |= order->busy && order->begun_by == here;
        return PyErr_Occurred() ? RAISED : DECLINED;
    }
    order->busy = 1, order->held_by = here;
    int planned_ = unchanged ? find_plan(self, args, call) : plan_call(self, args, call);
    int end = planned_ ? self->run(self, call) : PyErr_Occurred() ? RAISED : DECLINED;
    if (end == STARTED)
        order->begun_by = here;
    order->busy = end == STARTED;
    if (order->left && end != STARTED) {
        PyObject *done = run_when_left(&order->left);
        Py_XDECREF(done);
        end = done ? end : RAISED;
    }
    return end;
}

/* Run an op. Returns True if it is complete. */
static PyObject *run_fast_op(fast_path *self, fast_op op, PyObject *const *args, Py_ssize_t count) {
    if (count != operand_counts[op]) {
        PyErr_Format(PyExc_TypeError, "%d arguments are needed, not %zd", operand_counts[op], count);
        return NULL;
    }
    fast_call call = {.op = op};
    int end = run_call(self, &call, args, 0);
    return end == RAISED ? NULL : PyBool_FromLong(end == COMPLETED);
}

#define FAST_OP(NAME, OP)                                                                                \
    static PyObject *fast_##NAME(fast_path *self, PyObject *const *args, Py_ssize_t count) {             \
        return run_fast_op(self, OP, args, count);                                                       \
    }
FAST_OP(all_reduce, ALL_REDUCE)
FAST_OP(reduce_scatter, REDUCE_SCATTER)
FAST_OP(broadcast, BROADCAST)
FAST_OP(all_gather, ALL_GATHER)
FAST_OP(all_to_all, ALL_TO_ALL)
FAST_OP(barrier, BARRIER)

static PyMethodDef fast_methods[] = {
    FAST("all_reduce", fast_all_reduce), FAST("reduce_scatter", fast_reduce_scatter),
    FAST("broadcast", fast_broadcast),   FAST("all_gather", fast_all_gather),
    FAST("all_to_all", fast_all_to_all), FAST("barrier", fast_barrier),
    {NULL, NULL, 0, NULL},
};

/* -- creation and release */

/* Set the arguments that all paths share. */
static int fast_init(fast_path *self, PyObject *order, PyObject *planner, PyObject *observers, PyObject *journal, int rank, int size,
                     const tensors *known) {
    self->order = (Order *)Py_NewRef(order);
    self->planner = Py_NewRef(planner), self->observers = Py_NewRef(observers);
    self->observed = PyUnicode_InternFromString("observed");
    self->known = known, self->device = on_cpu, self->rank = rank, self->size = size;
    for (int op = 0; op <= BARRIER; op++)
        if (!(self->names[op] = PyUnicode_InternFromString(fast_ops[op])))
            return -1;
    if (journal != Py_None) {
        self->enter = PyObject_GetAttrString(journal, "enter"), self->leave = PyObject_GetAttrString(journal, "leave");
        if (!self->enter || !self->leave)
            return -1;
    }
    return self->observed ? 0 : -1;
}

static void fast_dealloc(fast_path *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF((PyObject *)self->order);
    PyObject *held[] = {self->planner, self->observers, self->observed, self->enter, self->leave};
    for (int i = 0; i < 5; i++)
        Py_XDECREF(held[i]);
    for (int op = 0; op <= BARRIER; op++)
        Py_XDECREF(self->names[op]);
    for (int i = 0; i < PLANS; i++) {
        Py_XDECREF(self->plans[i].reduction);
        Py_XDECREF(self->plans[i].detail);
        Py_XDECREF(self->plans[i].answer);
    }
    freefunc free_ = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_(self);
    Py_DECREF(type);
}

#endif
