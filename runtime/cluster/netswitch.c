/*
 * netswitch: an Ethernet switch over TAP devices, each port shaped in rate and latency.
 *
 *     netswitch QUEUE_BYTES FD,RATE_Bps,LATENCY_ns [FD,RATE_Bps,LATENCY_ns ...]
 *
 * FD is /dev/net/tun, opened in the network namespace of the node; the device is made here, as eth0. Each port has an
 * uplink (node to switch) and a downlink, each with that rate and latency, and at most QUEUE_BYTES waiting.
 * Frames move through both by a discrete-event emulation on CLOCK_MONOTONIC. "ready" on stdout says that the devices
 * are there. Lines on stdin: "cut PORT" drops all that comes from or goes to that port, "restore PORT" ends that.
 * The end of stdin ends the program, after it has printed its statistics: so it never outlives its parent.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "events.h"
#include "frame.h"
#include "link.h"

#define MAX_PORTS 64
#define FRAMES_PER_TURN 16 /* read from one port before the others and the clock get their turn */

struct port {
    int fd;
    bool cut;
    struct link *up, *down;
    int64_t frames_in, bytes_in, frames_out, bytes_out;
};

static struct port ports[MAX_PORTS];
static int num_ports;
static struct events events;
static int64_t dropped_full, dropped_cut, dropped_unknown, refused;
static int64_t late_count, late_sum_ns, late_most_ns;
static bool stopping;

static int64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void send_next(struct link *link, int64_t now_ns)
{
    int64_t sent_ns;
    if (link_start(link, now_ns, &sent_ns))
        events_push(&events, (struct event){.at_ns = sent_ns, .kind = LINK_SENT, .link = link});
}

static void enter_link(struct link *link, struct frame *frame, int64_t now_ns)
{
    if (!link_queue(link, frame)) {
        dropped_full++;
        free(frame);
        return;
    }
    send_next(link, now_ns);
}

/* What the node has sent goes into its uplink. */
static void read_port(int index)
{
    static unsigned char buffer[FRAME_MAX_BYTES];
    struct port *port = &ports[index];
    for (int turn = 0; turn < FRAMES_PER_TURN; turn++) {
        ssize_t num_bytes = read(port->fd, buffer, sizeof buffer);
        if (num_bytes <= 0)
            return;
        struct frame *frame = frame_new(buffer, (size_t)num_bytes, index);
        if (frame == NULL)
            continue;
        frame->dst = frame_destination(frame);
        port->frames_in++;
        port->bytes_in += frame->wire_bytes;
        if (frame->dst < 0 || frame->dst >= num_ports || frame->dst == index) {
            dropped_unknown++;
            free(frame);
        } else {
            enter_link(port->up, frame, clock_ns());
        }
    }
}

/* The frame has crossed both links: to its node. */
static void deliver(struct frame *frame, int64_t due_ns)
{
    struct port *port = &ports[frame->dst];
    int64_t late_ns = clock_ns() - due_ns;
    late_count++;
    late_sum_ns += late_ns;
    if (late_ns > late_most_ns)
        late_most_ns = late_ns;
    if (write(port->fd, frame->data, frame->num_bytes) < 0) {
        refused++; /* the interface is down */
    } else {
        port->frames_out++;
        port->bytes_out += frame->wire_bytes;
    }
    free(frame);
}

static void handle(struct event event)
{
    if (event.kind == LINK_SENT) {
        struct frame *frame = link_sent(event.link);
        events_push(&events, (struct event){.at_ns = event.at_ns + event.link->latency_ns,
                                            .kind = FRAME_ARRIVED,
                                            .link = event.link,
                                            .frame = frame});
        /* At the event's own time, not the clock's: being late must not lower the rate. */
        send_next(event.link, event.at_ns);
    } else if (ports[event.frame->src].cut || ports[event.frame->dst].cut) {
        dropped_cut++;
        free(event.frame);
    } else if (event.link->down) {
        deliver(event.frame, event.at_ns);
    } else {
        enter_link(ports[event.frame->dst].down, event.frame, event.at_ns);
    }
}

/* Commands from stdin; its end stops the program. */
static void read_commands(void)
{
    static char line[64];
    static size_t length;
    char byte;
    for (;;) {
        ssize_t got = read(STDIN_FILENO, &byte, 1);
        if (got == 0)
            stopping = true;
        if (got <= 0)
            return;
        if (byte != '\n') {
            if (length + 1 < sizeof line)
                line[length++] = byte;
            continue;
        }
        line[length] = '\0';
        length = 0;
        int index;
        if (sscanf(line, "cut %d", &index) == 1 && index >= 0 && index < num_ports)
            ports[index].cut = true;
        else if (sscanf(line, "restore %d", &index) == 1 && index >= 0 && index < num_ports)
            ports[index].cut = false;
        else
            printf("unknown command: %s\n", line);
    }
}

static void open_port(const char *spec, int64_t queue_bytes)
{
    struct port *port = &ports[num_ports];
    double rate_Bps;
    int64_t latency_ns;
    if (sscanf(spec, "%d,%lf,%" SCNd64, &port->fd, &rate_Bps, &latency_ns) != 3 || rate_Bps <= 0 || latency_ns < 0) {
        fprintf(stderr, "netswitch: port must be FD,RATE_Bps,LATENCY_ns, got %s\n", spec);
        exit(2);
    }
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    strcpy(request.ifr_name, "eth0");
    /* Checksums and cutting into segments are left undone on both sides: the frame reaches the other kernel as it is. */
    int unlimited = INT32_MAX;
    if (ioctl(port->fd, TUNSETIFF, &request) || ioctl(port->fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) ||
        ioctl(port->fd, TUNSETSNDBUF, &unlimited) || fcntl(port->fd, F_SETFL, O_NONBLOCK)) {
        perror("netswitch: TAP device");
        exit(1);
    }
    port->up = link_new(rate_Bps, latency_ns, queue_bytes, false);
    port->down = link_new(rate_Bps, latency_ns, queue_bytes, true);
    if (port->up == NULL || port->down == NULL) {
        perror("netswitch: link");
        exit(1);
    }
    num_ports++;
}

static void print_statistics(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    for (int i = 0; i < num_ports; i++)
        printf("port %d: sent %" PRId64 " frames %" PRId64 " bytes, received %" PRId64 " frames %" PRId64
               " bytes, most queued up %" PRId64 " down %" PRId64 " bytes\n",
               i, ports[i].frames_in, ports[i].bytes_in, ports[i].frames_out, ports[i].bytes_out,
               ports[i].up->most_queued_bytes, ports[i].down->most_queued_bytes);
    printf("forwarded %" PRId64 " dropped: queue full %" PRId64 ", link cut %" PRId64 ", no such port %" PRId64
           ", interface down %" PRId64 "\n",
           late_count - refused, dropped_full, dropped_cut, dropped_unknown, refused);
    printf("late: mean %.1f us, most %.1f us; cpu %.3f s\n",
           late_count ? (double)late_sum_ns / 1e3 / (double)late_count : 0.0, (double)late_most_ns / 1e3,
           (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
               (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6);
}

int main(int argc, char **argv)
{
    int64_t queue_bytes = argc > 1 ? atoll(argv[1]) : 0;
    if (argc < 3 || argc - 2 > MAX_PORTS || queue_bytes <= 0) {
        fprintf(stderr, "usage: netswitch QUEUE_BYTES FD,RATE_Bps,LATENCY_ns ... (1 to %d ports)\n", MAX_PORTS);
        return 2;
    }
    for (int i = 2; i < argc; i++)
        open_port(argv[i], queue_bytes);
    fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
    signal(SIGINT, SIG_IGN); /* Ctrl-C is the owner's affair */

    prctl(PR_SET_TIMERSLACK, 1L); /* the default lets timers run 50 us late */
    struct sched_param priority = {.sched_priority = 20};
    if (sched_setscheduler(0, SCHED_RR, &priority))
        printf("no real-time priority (%s): frames may be later\n", strerror(errno));
    printf("ready\n");
    fflush(stdout);

    struct pollfd polled[MAX_PORTS + 1];
    for (int i = 0; i < num_ports; i++)
        polled[i] = (struct pollfd){.fd = ports[i].fd, .events = POLLIN};
    polled[num_ports] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    while (!stopping) {
        int64_t wait_ns = 0;
        if (events.count > 0)
            wait_ns = events.heap[0].at_ns - clock_ns();
        struct timespec wait = {.tv_sec = 0, .tv_nsec = 0};
        if (wait_ns > 0)
            wait = (struct timespec){.tv_sec = wait_ns / 1000000000, .tv_nsec = wait_ns % 1000000000};
        if (ppoll(polled, (nfds_t)num_ports + 1, events.count > 0 ? &wait : NULL, NULL) < 0 && errno != EINTR)
            break;
        for (int i = 0; i < num_ports; i++)
            if (polled[i].revents & POLLIN)
                read_port(i);
        if (polled[num_ports].revents)
            read_commands();
        /* The clock is read anew: what became due meanwhile goes too, until nothing is due. */
        while (events_due(&events, clock_ns()))
            handle(events_pop(&events));
    }
    print_statistics();
    return 0;
}
