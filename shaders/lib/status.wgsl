// What a kernel reports to the host through the first words of the workspace: word 0 counts the workgroups that came to
// their end, so that a dropped launch is noticed; word 1 collects error bits. Host twin: `Status` in src/status.rs.

const STATUS_DONE = 0u;
const STATUS_ERRORS = 1u;
const ERROR_PAGE_ID = 1u;
const ERROR_CUT_SHORT = 2u;
const ERROR_SUBGROUP = 4u;
const ERROR_UNWRITTEN = 8u;

fn report_done(lane: u32) {
    if lane == 0u {
        atomicAdd(&workspace.status[STATUS_DONE], 1u);
    }
}

fn report_error(bit: u32) {
    atomicOr(&workspace.status[STATUS_ERRORS], bit);
}

// For workgroups that the plan has not: a grid may be larger than the plan's, but what is recorded has work. Parameters without
// any are those of a write that never came (`PlanBuffer::write` in src/plan/device.rs).
fn report_groups(groups: u32) {
    if groups == 0u {
        report_error(ERROR_UNWRITTEN);
    }
}
