"""What is gathered together, as data: blocks, policy, plan and rules; pure, without a process group or a device."""
