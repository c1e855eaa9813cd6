// Folding of a linear grid into three axes, for devices with few workgroups per axis. Host twin: `fold_grid`.

fn linear_group(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    return group.x + groups.x * (group.y + groups.y * group.z);
}
