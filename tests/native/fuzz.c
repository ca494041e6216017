/* Test random operations on random groups against a plain reference: `fuzz threads|processes SECONDS [SEED]`.
 *
 * The ranks of a round are threads of one process (for ThreadSanitizer) or forked processes (for AddressSanitizer). All
 * ranks draw the same script from the same seed. Each rank separately draws the location of its vectors, whether it runs
 * or submits an operation, and when it waits for the result. A round ends when all ranks close their groups or request
 * different operations, when one leaves while others wait, or when one is killed. */
#define _GNU_SOURCE
#include "operations.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* -- one rank -- */

typedef struct {
    const round_plan *plan;
    pln_group *groups[MOST_GROUPS];
    int rank, first_group, last_group;
} seat_taken;

/* A rank that detects a dead peer in one group also leaves the other group. */
static int may_fail(const round_plan *plan, int code)
{
    return plan->ending == END_KILL && (code == PLN_DEAD || (code == PLN_LEFT && plan->num_groups > 1));
}

/* Finish an operation and return whether it succeeded; it may fail only if the plan allows it. */
static int finish(const seat_taken *s, int g, flight *f, int code)
{
    if (f->ticket > 0) { /* poll repeatedly, wait with short timeouts, or wait until the end */
        while ((f->number + s->rank) % 4 == 1 && !pln_is_done(s->groups[g], f->ticket))
            sched_yield();
        const double piece_s = (f->number + s->rank) % 4 - 3 + (1 + f->number % 3) * 1e-4;
        do
            code = pln_wait(s->groups[g], f->ticket, piece_s >= 0 ? piece_s : -1);
        while (code == PLN_RUNNING);
    }
    if (code == PLN_OK) {
        verify(s->plan, s->rank, f);
        atomic_fetch_add(s->plan->num_done, 1);
    } else if (!may_fail(s->plan, code)) {
        char words[200];
        pln_explain(s->groups[g], words, sizeof words);
        FAIL("rank %d, operation %d: code %d, %s", s->rank, f->number, code, words);
    }
    if (f->is_own)
        free(f->memory);
    f->ticket = 0, f->memory = NULL;
    return code == PLN_OK;
}

static void *follow_script(void *argument)
{
    const seat_taken *s = argument;
    const round_plan *plan = s->plan;
    uint64_t common = plan->seed + (uint64_t)s->first_group, mine = plan->seed ^ (77 + (uint64_t)s->rank * 1000003);
    flight flights[MOST_GROUPS][WINDOW] = {0};
    int is_fine = 1;
    for (int n = 0; n < plan->num_ops && is_fine; n++) {
        const int g = s->first_group + (int)below(&common, (uint64_t)(s->last_group - s->first_group));
        flight *f = &flights[g][n % WINDOW];
        /* Reuse memory in an arena only after waiting for the earlier operation that used it. */
        if (f->memory != NULL && !finish(s, g, f, PLN_OK))
            break;
        *f = (flight){.asked = draw_operation(plan, &common), .number = n};
        prepare(plan, s->rank, g, f, &mine);
        const operation *o = &f->asked;
        if (below(&mine, 2)) {
            f->ticket = pln_submit(s->groups[g], o->kind, o->dtype, o->op, o->root, f->in, f->out, o->count, 0);
            if (f->ticket <= 0)
                FAIL("submitting returned %lld", (long long)f->ticket);
        } else {
            const int code =
                pln_run(s->groups[g], o->kind, o->dtype, o->op, o->root, f->in, f->out, o->count, TIMEOUT_S);
            is_fine = finish(s, g, f, code);
        }
        for (int w = 0; w < WINDOW && is_fine; w++) /* finish random operations in any order */
            if (flights[g][w].ticket > 0 && below(&mine, 4) == 0)
                is_fine = finish(s, g, &flights[g][w], PLN_OK);
    }
    for (int g = s->first_group; g < s->last_group; g++)
        for (int w = 0; w < WINDOW; w++)
            if (flights[g][w].memory != NULL)
                finish(s, g, &flights[g][w], PLN_OK);
    return NULL;
}

/* Runs on two threads of the leaving rank; if the other ranks arrive immediately, their barriers may still complete. */
static void *wait_without_end(void *argument)
{
    pln_group *g = argument;
    const int64_t ticket = pln_submit(g, PLN_BARRIER, 0, 0, 0, NULL, NULL, 0, 0);
    const int code = ticket < 0 ? (int)-ticket : pln_wait(g, ticket, -1);
    if (code != PLN_CLOSED && code != PLN_OK)
        FAIL("waiting while the group closes returned %d", code);
    return NULL;
}

static void end_badly(const seat_taken *s, pln_group *g)
{
    const round_plan *plan = s->plan;
    const int is_culprit = s->rank == plan->culprit;
    char words[300], wanted[60];
    float number[2] = {1, 1};
    if (plan->ending == END_MISMATCH) {
        const int code = pln_run(g, PLN_ALL_REDUCE, PLN_F32, PLN_SUM, 0, number, number, is_culprit ? 2 : 1, 0);
        pln_explain(g, words, sizeof words);
        snprintf(wanted, sizeof wanted, "rank %d an all-reduce (sum) of 2 float32", 100 + plan->culprit);
        if (code != PLN_MISMATCH || strstr(words, wanted) == NULL)
            FAIL("mismatched operations returned %d: %s", code, words);
    } else if (is_culprit) {
        pthread_t waiting[2];
        for (int i = 0; i < 2; i++)
            pthread_create(&waiting[i], NULL, wait_without_end, g);
        usleep((useconds_t)(plan->seed % 2000));
        pln_close(g);
        for (int i = 0; i < 2; i++)
            pthread_join(waiting[i], NULL);
    } else {
        while (plan->seed % 2 && !atomic_load(&g->shared->seats[plan->culprit].has_left))
            sched_yield();
        int code = PLN_OK;
        for (int i = 0; i < 3 && code == PLN_OK; i++)
            code = pln_run(g, PLN_BARRIER, 0, 0, 0, NULL, NULL, 0, 0);
        pln_explain(g, words, sizeof words);
        snprintf(wanted, sizeof wanted, "rank %d (", 100 + plan->culprit);
        if (code != PLN_LEFT || strstr(words, wanted) == NULL)
            FAIL("a rank left behind got %d: %s", code, words);
    }
}

static void take_part(const round_plan *plan, int rank)
{
    seat_taken all = {.plan = plan, .rank = rank, .last_group = plan->num_groups};
    int32_t names[MOST_RANKS];
    int64_t pids[MOST_RANKS];
    for (int r = 0; r < plan->size; r++) {
        names[r] = 100 + r;
        while ((pids[r] = atomic_load(&plan->pids[r])) == 0)
            sched_yield();
    }
    for (int g = 0; g < plan->num_groups; g++) {
        all.groups[g] = pln_open(plan->segments[g], plan->slot_bytes, rank, plan->size, names, pids, TIMEOUT_S, 1.2);
        if (all.groups[g] == NULL)
            FAIL("a group of %d ranks did not open", plan->size);
        all.groups[g]->progress = plan->first_phase;
        for (int a = 0; a < NUM_ARENAS; a++)
            pln_add_arena(all.groups[g], a + 1, plan->arenas[g][a], plan->part_bytes);
    }
    if (plan->is_apart) {
        pthread_t threads[MOST_GROUPS];
        seat_taken parts[MOST_GROUPS];
        for (int g = 0; g < plan->num_groups; g++) {
            parts[g] = all, parts[g].first_group = g, parts[g].last_group = g + 1;
            pthread_create(&threads[g], NULL, follow_script, &parts[g]);
        }
        for (int g = 0; g < plan->num_groups; g++)
            pthread_join(threads[g], NULL);
    } else {
        follow_script(&all);
    }
    if (plan->ending == END_MISMATCH || plan->ending == END_LEAVE)
        end_badly(&all, all.groups[0]);
    for (int g = 0; g < plan->num_groups; g++) {
        if (rank % 2)
            pln_close(all.groups[g]);
        pln_free(all.groups[g]);
    }
}

/* -- rounds -- */

static char *share(uint64_t bytes)
{
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        FAIL("no memory for %llu bytes", (unsigned long long)bytes);
    return memory;
}

typedef struct {
    const round_plan *plan;
    int rank;
} part;

static void *be_rank(void *argument)
{
    const part *p = argument;
    take_part(p->plan, p->rank);
    return NULL;
}

static void run_threads(const round_plan *plan)
{
    pthread_t threads[MOST_RANKS];
    part parts[MOST_RANKS];
    for (int r = 0; r < plan->size; r++) {
        parts[r] = (part){plan, r};
        atomic_store(&plan->pids[r], -1);
        pthread_create(&threads[r], NULL, be_rank, &parts[r]);
    }
    for (int r = 0; r < plan->size; r++)
        pthread_join(threads[r], NULL);
}

static void run_processes(const round_plan *plan)
{
    pid_t children[MOST_RANKS];
    fflush(NULL);
    for (int r = 0; r < plan->size; r++) {
        children[r] = fork();
        if (children[r] == 0) {
            take_part(plan, r);
            _exit(0); /* skip the leak check, which takes seconds per child; runs with threads include it */
        }
    }
    for (int r = 0; r < plan->size; r++)
        atomic_store(&plan->pids[r], children[r]);
    if (plan->ending == END_KILL) {
        usleep((useconds_t)(plan->seed % 20000));
        kill(children[plan->culprit], SIGKILL);
    }
    for (int i = 0; i < plan->size; i++) {
        const int r = (plan->culprit + 1 + i) % plan->size; /* the victim stays a zombie until the end */
        int status = 0;
        waitpid(children[r], &status, 0);
        const int was_killed = plan->ending == END_KILL && r == plan->culprit && WIFSIGNALED(status);
        if (status != 0 && !was_killed)
            FAIL("rank %d ended with status %d", r, status);
    }
}

static void run_round(int are_processes, uint64_t seed, _Atomic uint64_t *num_done)
{
    static const uint64_t slots[] = {1024, 4096, 4096, 8192, 33000};
    uint64_t state = seed;
    round_plan plan = {.seed = next(&state), .num_done = num_done};
    plan.size = 1 + (int)below(&state, MOST_RANKS);
    plan.slot_bytes = slots[below(&state, 5)];
    plan.part_bytes = WINDOW * 4096 * (1 + below(&state, 12));
    plan.num_groups = 1 + (int)below(&state, MOST_GROUPS);
    plan.is_apart = (int)below(&state, 2);
    plan.num_ops = 10 + (int)below(&state, 40);
    plan.ending = (int)below(&state, are_processes ? END_KILL + 1 : END_KILL);
    plan.culprit = plan.size > 1 ? 1 + (int)below(&state, (uint64_t)plan.size - 1) : 0;
    if (plan.size == 1)
        plan.ending = END_CLOSE;
    plan.first_phase = below(&state, 2) ? UINT32_MAX - (uint32_t)below(&state, 200) : 0;
    const char *const kernels[] = {"avx512", "avx2", "sse2", "neon"};
    pln_use_cpu(kernels[below(&state, 4)]);
    const uint64_t segment_bytes = pln_segment_bytes(plan.size, plan.slot_bytes);
    const uint64_t arena_bytes = plan.part_bytes * (uint64_t)plan.size;
    plan.pids = (_Atomic int64_t *)share(4096);
    for (int g = 0; g < plan.num_groups; g++) {
        plan.segments[g] = share(segment_bytes);
        for (int r = 0; r < plan.size; r++)
            ((segment *)plan.segments[g])->seats[r].progress = plan.first_phase;
        for (int a = 0; a < NUM_ARENAS; a++)
            plan.arenas[g][a] = share(arena_bytes);
    }
    (are_processes ? run_processes : run_threads)(&plan);
    for (int g = 0; g < plan.num_groups; g++) {
        munmap(plan.segments[g], segment_bytes);
        for (int a = 0; a < NUM_ARENAS; a++)
            munmap(plan.arenas[g][a], arena_bytes);
    }
    munmap((void *)plan.pids, 4096);
}

int main(int argc, char **argv)
{
    if (argc < 3 || (strcmp(argv[1], "threads") != 0 && strcmp(argv[1], "processes") != 0)) {
        fprintf(stderr, "usage: fuzz threads|processes SECONDS [SEED]\n");
        return 2;
    }
    const double until = pln_now() + atof(argv[2]);
    the_seed = argc > 3 ? strtoull(argv[3], NULL, 10) : (uint64_t)(pln_now() * 1e6);
    printf("seed %llu\n", (unsigned long long)the_seed);
    _Atomic uint64_t *num_done = (_Atomic uint64_t *)share(4096);
    for (the_round = 0; the_round == 0 || pln_now() < until; the_round++)
        run_round(argv[1][0] == 'p', the_seed + (uint64_t)the_round, num_done);
    printf("%d rounds, %llu operations, none wrong\n", the_round, (unsigned long long)atomic_load(num_done));
    return 0;
}
