"""The Lua that counts inside Redis: one script lets a request in, one settles it. `shared.py` is its only caller.

Arguments and answers are words in one string: packing and parsing them one by one costs a worker more than all else.

Both do the arithmetic of `window.py`: a hash of 61 one-second slots with `t` (total), `c` (the slot that it has been
brought up to) and `n` (the newest slot that something was added to). The time is Redis's own, so that the clocks of
gateways do not matter. Places in flight are leases: those of a gateway that died run out by themselves.
"""

from __future__ import annotations

_WINDOW = """
local SLOTS = 61
local given = {}
for word in string.gmatch(ARGV[1], '%S+') do given[#given + 1] = word end
local now = redis.call('TIME')
local second = tonumber(now[1])
local now_ms = second * 1000 + math.floor(tonumber(now[2]) / 1000)

local function advance(key)
  local head = redis.call('HMGET', key, 't', 'c', 'n')
  local total, current, newest = tonumber(head[1] or 0), tonumber(head[2] or 0), tonumber(head[3] or 0)
  if second <= current then return total, current, newest end
  if second - current >= SLOTS then
    if total > 0 then redis.call('DEL', key) end
    return 0, second, 0
  end
  local passed = {}
  for slot = current + 1, second do passed[#passed + 1] = slot % SLOTS end
  local amounts = redis.call('HMGET', key, unpack(passed))
  for _, amount in ipairs(amounts) do total = total - tonumber(amount or 0) end
  redis.call('HDEL', key, unpack(passed))
  redis.call('HSET', key, 't', total, 'c', second)
  return total, second, newest
end

local function add(key, amount)
  local total, current = advance(key)
  redis.call('HINCRBY', key, current % SLOTS, amount)
  redis.call('HSET', key, 't', total + amount, 'c', current, 'n', current)
  redis.call('EXPIRE', key, SLOTS + 1)
  return total + amount
end

local function below_in_ms(key, current, total, limit)
  for slot = current - SLOTS + 1, current do
    if total < limit then return 0 end
    local amount = tonumber(redis.call('HGET', key, slot % SLOTS) or 0)
    total = total - amount
    if amount > 0 and total < limit then return (slot + SLOTS) * 1000 - now_ms end
  end
  return 0
end

local function empty_in_ms(total, newest)
  if total <= 0 then return 0 end
  return (newest + SLOTS) * 1000 - now_ms
end
"""

ENTER = (
    _WINDOW
    + """
-- KEYS: requests, tokens, places, day, month
-- given: limits of requests and tokens a minute, places, tokens a day and month (-1: none); request; lease in ms
-- gives: over, running, requests, reset ms, tokens, reset ms, day, month, retry ms; over as in standing.Over, 0: in
local rpm, tpm, places = tonumber(given[1]), tonumber(given[2]), tonumber(given[3])
local per_day, per_month = tonumber(given[4]), tonumber(given[5])
local running, requests, r_newest, tokens, t_newest, day, month = 0, 0, 0, 0, 0, 0, 0
local r_current, t_current
if places >= 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now_ms)
  running = redis.call('ZCARD', KEYS[3])
end
if rpm >= 0 then requests, r_current, r_newest = advance(KEYS[1]) end
if tpm >= 0 then tokens, t_current, t_newest = advance(KEYS[2]) end
if per_day >= 0 then day = tonumber(redis.call('GET', KEYS[4]) or 0) end
if per_month >= 0 then month = tonumber(redis.call('GET', KEYS[5]) or 0) end

local over, retry = 0, 0
if per_month >= 0 and month >= per_month then
  over = 5
elseif per_day >= 0 and day >= per_day then
  over = 4
elseif tpm >= 0 and tokens >= tpm then
  over, retry = 3, below_in_ms(KEYS[2], t_current, tokens, tpm)
elseif rpm >= 0 and requests >= rpm then
  over, retry = 2, below_in_ms(KEYS[1], r_current, requests, rpm)
elseif places >= 0 and running >= places then
  over, retry = 1, 1000
else
  if rpm >= 0 then
    requests = add(KEYS[1], 1)
    r_newest = math.max(second, r_current)
  end
  if places >= 0 then
    running = running + 1
    redis.call('ZADD', KEYS[3], now_ms + tonumber(given[7]), given[6])
    redis.call('PEXPIRE', KEYS[3], tonumber(given[7]))
  end
end
local r_reset, t_reset = empty_in_ms(requests, r_newest), empty_in_ms(tokens, t_newest)
local told = {over, running, requests, r_reset, tokens, t_reset, day, month, retry}
for i = 1, #told do told[i] = string.format('%.0f', told[i]) end
return table.concat(told, ' ')
"""
)

SETTLE = (
    _WINDOW
    + """
-- KEYS as above; given: tokens; 1 where that kind is limited, else 0, of tokens a minute, a day, a month;
-- request ('-' where it holds no place); seconds that the day's and month's sums are kept
local tokens = tonumber(given[1])
if tokens > 0 then
  if given[2] == '1' then add(KEYS[2], tokens) end
  if given[3] == '1' then
    redis.call('INCRBY', KEYS[4], tokens)
    redis.call('EXPIRE', KEYS[4], tonumber(given[6]))
  end
  if given[4] == '1' then
    redis.call('INCRBY', KEYS[5], tokens)
    redis.call('EXPIRE', KEYS[5], tonumber(given[7]))
  end
end
if given[5] ~= '-' then redis.call('ZREM', KEYS[3], given[5]) end
return 0
"""
)

RENEW = """
-- KEYS: places; given: lease in ms, requests that still run
local given = {}
for word in string.gmatch(ARGV[1], '%S+') do given[#given + 1] = word end
local now = redis.call('TIME')
local ends = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000) + tonumber(given[1])
for i = 2, #given do redis.call('ZADD', KEYS[1], 'XX', ends, given[i]) end
redis.call('PEXPIRE', KEYS[1], tonumber(given[1]))
return 0
"""
