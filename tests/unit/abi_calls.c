/* calls.h against libraries that fail in every way known: made-up codes in, -errno out. */
#include "calls.h"

#include <stdio.h>
#include <stdlib.h>

static int failures;

static void expect(int line, const char *expression, long got, long wanted)
{
    if (got == wanted)
        return;
    fprintf(stderr, "%d: %s is %ld, not %ld\n", line, expression, got, wanted);
    failures++;
}

#define EXPECT(expression, wanted) expect(__LINE__, #expression, expression, wanted)

static int answer;     /* what the next call returns */
static int with_errno; /* what it leaves in errno */
static struct ibv_pd a_pd;

static int reply(void)
{
    if (with_errno)
        errno = with_errno;
    return answer;
}

static struct ibv_pd *alloc_pd(struct ibv_context *context)
{
    (void)context;
    return reply() ? &a_pd : NULL;
}

static int modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    (void)qp, (void)attr, (void)mask;
    return reply();
}

static int get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **context)
{
    (void)channel, (void)cq, (void)context;
    return reply();
}

static int disconnect(struct rdma_cm_id *id)
{
    (void)id;
    return reply();
}

static int poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
    (void)cq, (void)n, (void)wc;
    return reply();
}

static void says(int code, int number)
{
    answer = code;
    with_errno = number;
    errno = ENOTTY; /* left over from something else; must never leak out */
}

int main(void)
{
    struct rn_library lib = {
        .ibv_alloc_pd = alloc_pd,
        .ibv_modify_qp = modify_qp,
        .ibv_get_cq_event = get_cq_event,
        .rdma_disconnect = disconnect,
    };
    struct ibv_context context = {.ops = {.poll_cq = poll_cq}};
    struct ibv_cq cq = {.context = &context};
    struct ibv_pd *pd;
    struct ibv_mr *mr;

    says(1, 0), EXPECT(rn_alloc_pd(&lib, &context, &pd), 0), EXPECT(pd == &a_pd, 1);
    says(0, ENOMEM), EXPECT(rn_alloc_pd(&lib, &context, &pd), -ENOMEM), EXPECT(pd == NULL, 1);
    says(0, 0), EXPECT(rn_alloc_pd(&lib, &context, &pd), -EIO);

    says(0, 0), EXPECT(rn_modify_qp(&lib, NULL, NULL, 0), 0);
    says(EINVAL, 0), EXPECT(rn_modify_qp(&lib, NULL, NULL, 0), -EINVAL);
    says(-EINVAL, 0), EXPECT(rn_modify_qp(&lib, NULL, NULL, 0), -EINVAL);
    says(-1, EBUSY), EXPECT(rn_modify_qp(&lib, NULL, NULL, 0), -EBUSY);
    says(-1, 0), EXPECT(rn_modify_qp(&lib, NULL, NULL, 0), -EIO);

    says(0, 0), EXPECT(rn_get_cq_event(&lib, NULL, NULL, NULL), 0);
    says(-1, EAGAIN), EXPECT(rn_get_cq_event(&lib, NULL, NULL, NULL), -EAGAIN);
    says(-1, 0), EXPECT(rn_get_cq_event(&lib, NULL, NULL, NULL), -EIO);
    says(-1, ENOTCONN), EXPECT(rn_disconnect(&lib, NULL), -ENOTCONN);

    says(3, 0), EXPECT(rn_poll_cq(&cq, 16, NULL), 3);
    says(0, 0), EXPECT(rn_poll_cq(&cq, 16, NULL), 0);
    says(-2, EAGAIN), EXPECT(rn_poll_cq(&cq, 16, NULL), -EIO);

    /* What an older library lacks. */
    EXPECT(rn_establish(&lib, NULL), -EOPNOTSUPP);
    EXPECT(rn_reg_dmabuf_mr(&lib, NULL, 0, 0, 0, -1, 0, &mr), -EOPNOTSUPP);
    EXPECT(verbs_get_ctx_op(&context, create_cq_ex) == NULL, 1);
    EXPECT(ibv_query_rt_values_ex(&context, NULL), EOPNOTSUPP);

    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
