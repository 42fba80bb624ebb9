from keras_efficient_attn.ops.common.plan.plan import (
    DEVICE_PLANS,
    DevicePlan,
    device_kind,
    device_plan,
    has_one_tpu,
    plan_for,
)

__all__ = [
    "DEVICE_PLANS",
    "DevicePlan",
    "device_kind",
    "device_plan",
    "has_one_tpu",
    "plan_for",
]
