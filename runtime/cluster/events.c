#include "events.h"

#include <stdio.h>
#include <stdlib.h>

static bool before(const struct event *a, const struct event *b)
{
    return a->at_ns < b->at_ns || (a->at_ns == b->at_ns && a->order < b->order);
}

void events_push(struct events *events, struct event event)
{
    if (events->count == events->capacity) {
        events->capacity = events->capacity ? 2 * events->capacity : 1024;
        events->heap = realloc(events->heap, events->capacity * sizeof *events->heap);
        if (events->heap == NULL) {
            perror("netswitch: event heap");
            exit(1);
        }
    }
    event.order = events->pushed++;
    size_t hole = events->count++;
    while (hole > 0 && before(&event, &events->heap[(hole - 1) / 2])) {
        events->heap[hole] = events->heap[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    events->heap[hole] = event;
}

bool events_due(const struct events *events, int64_t now_ns)
{
    return events->count > 0 && events->heap[0].at_ns <= now_ns;
}

struct event events_pop(struct events *events)
{
    struct event first = events->heap[0], last = events->heap[--events->count];
    size_t hole = 0;
    for (size_t child = 1; child < events->count; child = 2 * hole + 1) {
        if (child + 1 < events->count && before(&events->heap[child + 1], &events->heap[child]))
            child++;
        if (!before(&events->heap[child], &last))
            break;
        events->heap[hole] = events->heap[child];
        hole = child;
    }
    events->heap[hole] = last;
    return first;
}
