"""Limits of cgroups, versions 1 and 2."""

from doctor_facts import write_files

from allred.cluster.processors import Limits, limits


def test_limits_of_cgroups_version_2_come_from_every_level_above(tmp_path):
    write_files(
        tmp_path,
        {"a/memory.max": "1000", "a/b/memory.max": "max", "a/cpu.max": "max 100000", "a/b/cpu.max": "150000 100000"},
    )
    assert limits(tmp_path, "0::/a/b\n") == Limits(1000, 1.5)
    assert limits(tmp_path, "0::/elsewhere\n") == Limits(None, None)


def test_limits_of_cgroups_version_1(tmp_path):
    write_files(
        tmp_path,
        {
            "memory/job/memory.limit_in_bytes": "2000",
            "memory/memory.limit_in_bytes": str(2**63 - 4096),
            "cpu,cpuacct/job/cpu.cfs_quota_us": "200000",
            "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    own = "5:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/job\n0::/job\n"
    assert limits(tmp_path, own) == Limits(2000, 2.0)


def test_in_a_container_the_mount_itself_is_looked_at(tmp_path):
    write_files(tmp_path, {"memory.max": "3000", "cpu.max": "50000 100000"})
    assert limits(tmp_path, "0::/system.slice/docker-1.scope\n") == Limits(3000, 0.5)
