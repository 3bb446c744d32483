"""Who keeps failing gets no requests for a while, longer each time, until a success."""

from frontend.fleet.outlier import Outlier


def test_ejection_grows_and_a_success_forgets() -> None:
    outlier = Outlier()
    for _ in range(4):
        outlier.failed(0.0)
    assert not outlier.is_ejected(0.0)
    outlier.failed(0.0)
    assert outlier.is_ejected(0.9)
    assert not outlier.is_ejected(1.0)
    for _ in range(5):
        outlier.failed(10.0)
    assert outlier.is_ejected(11.9)
    assert not outlier.is_ejected(12.0)
    assert outlier.num_ejections == 2
    for _ in range(4):
        outlier.failed(20.0)
    outlier.succeeded()
    outlier.failed(20.0)
    assert not outlier.is_ejected(20.0)


def test_what_fails_while_it_is_ejected_was_on_its_way() -> None:
    """200 requests that fail together are one ejection of the first length, not forty."""
    outlier = Outlier()
    for _ in range(200):
        outlier.failed(0.0)
    for _ in range(2):
        outlier.lost(0.5)
    assert outlier.num_ejections == 1
    assert not outlier.is_ejected(1.0)


def test_lost_sessions_eject_too_but_not_the_first() -> None:
    outlier = Outlier()
    outlier.lost(0.0)
    assert not outlier.is_ejected(0.0)
    outlier.lost(0.0)
    assert outlier.is_ejected(0.5)


def test_no_ejection_is_longer_than_half_a_minute() -> None:
    outlier, now = Outlier(), 0.0
    for _ in range(20):
        outlier.lost(now)
        outlier.lost(now)
        assert outlier.is_ejected(now)
        assert not outlier.is_ejected(now + 30.0)
        now += 30.0
