-- Metering: every limit of every request, and the ledger. One call is one atomic step.
-- tests/support/plain_meter.py is the same in Python; a test holds them equal.
--
-- A request is reserved for at the door, with what it may use at most, and settled at its end with
-- what it used. Between them its gateway renews a lease and tells what was used so far; when the
-- lease runs out (the gateway was killed) the request is settled with what was told last, as "lost".
-- All steps may be carried out twice: a request has one reservation, and what it was charged is
-- remembered, so that settling it again charges the difference, which is nothing or, after a lease
-- that ran out under a gateway that lives, what was not told yet. A gateway that hands a request
-- over renews its lease, and the next one reserves for it: what stands is its reservation. One that
-- was settled as lost and goes on stands again, for the rest. A step for another model than was
-- reserved for gives that reservation back first. Each gateway's way past the limits is an attempt:
-- one that is released takes back what it reserved itself, and nothing that another has; one that is
-- cancelled while another is at the same request ends nothing. What has ended and is done again by
-- another attempt (a job whose answer was lost, or cut off) needs room again, for what is not charged.
--
-- Kinds of rules:
--   per minute or hour   GCRA (a leaky bucket as one time): `most` at once, and `most` again in each
--                        period, evenly. Using more than was reserved makes a debt; of what was not
--                        used comes back what has not leaked meanwhile.
--   per day or month     a count of the calendar's, UTC by Redis' clock. What is reserved before
--                        midnight is charged to the day before.
--   neither              so many at once.
--
-- Keys, all below KEYS[1] (one hash slot):
--   :open              hash    request -> its reservation (msgpack)
--   :due               zset    request -> its lease, µs
--   :aside             hash    request -> a reservation that cannot be read; expires
--   :done:<request>    string  what it was charged, as what, by which attempt (msgpack); expires
--   :ledger            stream  one entry for each request that ended, and one for each correction
--   :b:<rule>          string  a bucket (msgpack, see there); expires when it is full
--   :c:<rule>:<date>   hash    held, used; expires a day after its period
--   :n:<rule>          zset    request -> its lease; expires with the last
--
-- ARGV: op, lease (µs), memory (s: for how long what was charged is remembered), then
--   reserve  id, run     -> JSON: see `told`
--   hold     id, run     nothing is refused: a lease is renewed, or made anew
--   settle   id, run     -> 1 if something was charged
--   release  id, run     nothing is charged: what this attempt reserved, or will by a late call
--   sweep    most        -> how many were settled as lost, and the requests that were set aside
-- run, JSON: who: {field: text, ...} as the ledger has it; rules: [{key, of, per, most}, ...];
-- held: {requests, tokens, cost}; used: {prompt, cached, output, cost}; status, when it is settled;
-- attempt.
-- Costs are in billionths of the currency.

local root = KEYS[1]
local op, lease, memory = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local call = redis.call
local time = call('TIME')
local now = tonumber(time[1]) * 1e6 + tonumber(time[2]) -- µs

local SECOND, DAY = 1e6, 86400e6
local BUCKETS = {minute = 60e6, hour = 3600e6}
local NEVER = -1
local SOON = SECOND -- when a place or a reservation may have come back: nobody knows
local SWEPT = 10 -- leases at most that one request's call ends for others
local ASIDE_S = 7 * 86400

local function key(...) return table.concat({root, ...}, ':') end
local OPEN, DUE, ASIDE, LEDGER = key('open'), key('due'), key('aside'), key('ledger')
local function exact(x) return string.format('%.17g', x) end
local function whole(x) return string.format('%.0f', x) end

-- ---- the calendar -------------------------------------------------------------------------------

-- The date's name and the end of its period, µs. Days to dates: Howard Hinnant, "chrono-Compatible
-- Low-Level Date Algorithms", civil_from_days.
local function period(per)
  local days, floor = math.floor(now / DAY), math.floor
  local z = days + 719468
  local era = floor(z / 146097)
  local doe = z - era * 146097
  local yoe = floor((doe - floor(doe / 1460) + floor(doe / 36524) - floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + floor(yoe / 4) - floor(yoe / 100))
  local mp = floor((5 * doy + 2) / 153)
  local day = doy - floor((153 * mp + 2) / 5) + 1
  local month = mp < 10 and mp + 3 or mp - 9
  local year = yoe + era * 400 + (month <= 2 and 1 or 0)
  if per == 'day' then
    return string.format('%04d-%02d-%02d', year, month, day), (days + 1) * DAY
  end
  local leap = (year % 4 == 0 and year % 100 ~= 0) or year % 400 == 0
  local lengths = {31, leap and 29 or 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31}
  return string.format('%04d-%02d', year, month), (days - day + 1 + lengths[month]) * DAY
end

-- ---- kinds of rules: `look` says (left, µs until `need` fits: 0 now, µs until all is free), and
-- ---- `move` changes what is held and what is used ----------------------------------------------

local bucket, calendar, places = {}, {}, {}

-- A bucket: {when it is full again, µs; the number of its last addition; and then pairs, of an
-- addition's number and the level (µs until it is full) right before that}. Numbers rise, with time.
-- Of the pairs those are kept whose level is the lowest from there on. So what a reservation may
-- give back is known: had it never been made, the level would be lower by its amount, but never
-- below zero; what the level did not hold at its lowest since then has leaked, and does not come
-- back. A new low makes all before it superfluous: there are few.
local PAIRS = 64 -- at most
local loaded = {}

local function load(rule)
  local known = loaded[rule.at]
  if not known then
    local stored = call('GET', rule.at)
    known = stored and cmsgpack.unpack(stored) or {0, 0}
    loaded[rule.at] = known
  end
  return known
end

local function store(rule, state)
  loaded[rule.at] = state
  if state[1] <= now then
    call('DEL', rule.at)
  else
    call('SET', rule.at, cmsgpack.pack(state), 'PX', whole(math.ceil((state[1] - now) / 1e3)))
  end
end

local function drop_last(state)
  state[#state] = nil
  state[#state] = nil
end

-- Two neighbours become one that gives back less: those whose levels are nearest.
local function merge(state, level)
  local best, least
  for i = 3, #state - 3, 2 do
    local span = (state[i + 5] or level) - state[i + 1]
    if not least or span < least then best, least = i, span end
  end
  state[best] = state[best + 2]
  table.remove(state, best + 3)
  table.remove(state, best + 2)
end

local function add(rule, amount)
  local state = load(rule)
  local level = math.max(0, state[1] - now)
  while #state > 2 and state[#state] >= level do drop_last(state) end
  if #state >= 2 + 2 * PAIRS then merge(state, level) end
  state[1], state[2] = now + level + amount, math.max(now, state[2] + 1)
  state[#state + 1] = state[2]
  state[#state + 1] = level
  rule.number = state[2]
  store(rule, state)
end

local function give_back_of(rule, amount)
  local state = load(rule)
  local level = state[1] - now
  if level <= 0 or not rule.number then return end
  local before, after = {state[1], state[2]}, {}
  for i = 3, #state, 2 do
    local to = state[i] > rule.number and after or before
    to[#to + 1] = state[i]
    to[#to + 1] = state[i + 1]
  end
  local back = math.min(amount, level, after[2] or level)
  local low = (after[2] or level) - back
  while #before > 2 and before[#before] >= low do drop_last(before) end
  for i = 1, #after, 2 do
    before[#before + 1] = after[i]
    before[#before + 1] = after[i + 1] - back
  end
  before[1] = before[1] - back
  store(rule, before)
end

function bucket.look(rule, need)
  local full = BUCKETS[rule.per]
  local ahead = math.max(0, load(rule)[1] - now)
  if need > rule.most or rule.most == 0 then return 0, NEVER, ahead end
  local wait = ahead + need * full / rule.most - full
  return math.max(0, (full - ahead) * rule.most / full), wait > 1 and wait or 0, ahead
end

function bucket.move(rule, held, used)
  local amount = held + math.max(0, used) -- what was charged before is not given back here
  local change = rule.most == 0 and 0 or amount * BUCKETS[rule.per] / rule.most
  if change > 0 then add(rule, change) end
  if change < 0 then give_back_of(rule, -change) end
end

function calendar.look(rule, need)
  local held = tonumber(call('HGET', rule.at, 'held') or 0)
  local used = tonumber(call('HGET', rule.at, 'used') or 0)
  local left, after = math.max(0, rule.most - used - held), rule.ends - now
  if need > rule.most or rule.most == 0 then return left, NEVER, after end
  if need <= left then return left, 0, after end
  return left, need <= rule.most - used and SOON or after, after
end

function calendar.move(rule, held, used)
  if held ~= 0 and call('HINCRBY', rule.at, 'held', whole(held)) < 0 then
    call('HSET', rule.at, 'held', 0) -- the key was lost meanwhile
  end
  if used ~= 0 and call('HINCRBY', rule.at, 'used', whole(used)) < 0 then
    call('HSET', rule.at, 'used', 0)
  end
  call('EXPIREAT', rule.at, whole((rule.ends + DAY) / SECOND))
end

function places.look(rule)
  call('ZREMRANGEBYSCORE', rule.at, '-inf', exact(now))
  local left = rule.most - call('ZCARD', rule.at)
  if rule.most < 1 then return 0, NEVER, 0 end
  return math.max(0, math.floor(left)), left >= 1 and 0 or SOON, 0
end

function places.move() end -- by `stand` and `leave`, as it is known who stands there

local function kind(rule)
  return rule.of == 'concurrent' and places or BUCKETS[rule.per] and bucket or calendar
end

-- Where each rule's count is now.
local function located(rules)
  for _, rule in ipairs(rules) do
    local of = kind(rule)
    if of == calendar then
      local date, ends = period(rule.per)
      rule.at, rule.ends = key('c', rule.key, date), ends
    else
      rule.at = key(of == places and 'n' or 'b', rule.key)
    end
  end
  return rules
end

-- ---- reservations -------------------------------------------------------------------------------

local function unpacked(stored) return stored and cmsgpack.unpack(stored) or nil end

local function are(kind, of, names)
  for _, name in ipairs(names) do
    if type(of[name]) ~= kind then return false end
  end
  return true
end

local WHO = {'tenant', 'user', 'model', 'tier', 'route'}
local USED = {'prompt', 'cached', 'output', 'cost'}

local function is_sound(run)
  if type(run) ~= 'table' or not are('table', run, {'who', 'rules', 'held', 'used'}) then return false end
  for _, rule in ipairs(run.rules) do
    if type(rule) ~= 'table' or not are('string', rule, {'at', 'of', 'per'}) then return false end
    if not are('number', rule, {'most'}) then return false end
  end
  return are('string', run.who, WHO) and are('number', run.used, USED)
    and are('number', run.held, {'requests', 'tokens', 'cost'})
end

-- Its reservation; none, if that is not one (what another version wrote, or a hand).
local function find(id)
  local stored = call('HGET', OPEN, id)
  if not stored then return nil end
  local is_read, run = pcall(cmsgpack.unpack, stored)
  return is_read and is_sound(run) and run or nil
end

-- A reservation that cannot be read holds up no other. What it held in buckets fills up by itself.
local function set_aside(id)
  call('HSET', ASIDE, id, call('HGET', OPEN, id))
  call('EXPIRE', ASIDE, ASIDE_S)
  call('HDEL', OPEN, id)
  call('ZREM', DUE, id)
end

-- Of a request that another attempt was released from, nothing.
local function charged(id, run)
  local known = unpacked(call('GET', key('done', id)))
  if known and known.status == 'released' and known.attempt ~= run.attempt then return nil end
  return known
end

local function stand(id, run)
  run.by = run.by or run.attempt -- who came last
  call('HSET', OPEN, id, cmsgpack.pack(run))
  call('ZADD', DUE, exact(now + lease), id)
  for _, rule in ipairs(run.rules) do
    if rule.of == 'concurrent' then
      call('ZADD', rule.at, exact(now + lease), id)
      call('PEXPIRE', rule.at, whole(math.ceil(lease / 1e3)))
    end
  end
end

local function leave(id, run)
  call('HDEL', OPEN, id)
  call('ZREM', DUE, id)
  for _, rule in ipairs(run.rules) do
    if rule.of == 'concurrent' then call('ZREM', rule.at, id) end
  end
end

local function amounts(used)
  return {requests = 1, tokens = used.prompt + used.output, cost = used.cost}
end

local function move(run, held, used)
  for _, rule in ipairs(run.rules) do
    kind(rule).move(rule, held and held[rule.of] or 0, used and used[rule.of] or 0)
  end
end

local function less(a, b)
  local left = {}
  for name, amount in pairs(a) do left[name] = amount - (b and b[name] or 0) end
  return left
end

local function some(amounts)
  for _, amount in pairs(amounts) do
    if amount ~= 0 then return true end
  end
  return false
end

local function give_back(id, run)
  leave(id, run)
  move(run, less({requests = 0, tokens = 0, cost = 0}, run.held), nil)
end

-- What is reserved for the request, if it is for the model that `run` is of.
local function standing(id, run)
  local known = find(id)
  if known and known.who.model ~= run.who.model then
    give_back(id, known)
    return nil
  end
  return known
end

-- ---- the ledger ---------------------------------------------------------------------------------

local function enter(id, run, used, status)
  local entry = {'id', id, 'status', status}
  for _, field in ipairs(USED) do
    table.insert(entry, field)
    table.insert(entry, whole(used[field]))
  end
  for _, field in ipairs(WHO) do
    table.insert(entry, field)
    table.insert(entry, run.who[field])
  end
  call('XADD', LEDGER, '*', unpack(entry))
end

local function remember(id, used, status, attempt)
  local known = {used = used, status = status, attempt = attempt}
  call('SET', key('done', id), cmsgpack.pack(known), 'EX', memory)
end

-- Whether less was used than was charged `before`. An answer only grows: a gateway that tells of less
-- than was settled had been taken for dead, and another has ended the request since. So does what was
-- read: a file's job that is done again finds what the first run embedded, and embeds nothing. One
-- that was taken for lost and `failed` is charged for what was shown, which may be nothing.
local function shrinks(used, before, status)
  local was_lost = before.status == 'lost'
  if used.output == before.used.output then
    return used.prompt < before.used.prompt and not (was_lost and status == 'failed')
  end
  return used.output < before.used.output and not was_lost
end

-- Ends a request with what it used, less what it was charged `before`. What it held is back.
local function close(id, run, held, before, status)
  if before and shrinks(run.used, before, status) then run.used = before.used end
  local missing = less(run.used, before and before.used)
  local counted = amounts(missing)
  if before then counted.requests = 0 end
  move(run, less({requests = 0, tokens = 0, cost = 0}, held), counted)
  remember(id, run.used, status, run.by or run.attempt)
  if before and not some(missing) then return 0 end
  enter(id, run, missing, before and 'correction' or status)
  return 1
end

-- How many were settled. `aside`: takes the requests that cannot be read, which else stay.
local function sweep(most, aside)
  local settled = 0
  for _, id in ipairs(call('ZRANGEBYSCORE', DUE, '-inf', exact(now), 'LIMIT', 0, most)) do
    local run = find(id)
    if run then
      settled = settled + 1
      leave(id, run)
      close(id, run, run.held, charged(id, run), 'lost')
    elseif call('HEXISTS', OPEN, id) == 0 then
      call('ZREM', DUE, id)
    elseif aside then
      set_aside(id)
      aside[#aside + 1] = id
    end
  end
  return settled
end

-- ---- what can be asked --------------------------------------------------------------------------

local ops = {}

local swept = 0 -- at this door

-- granted; the rule in the way (its number from 1) and µs until the request fits, -1: never; and of
-- each rule what is left, in it and µs until all of it is; and how many requests' leases were over.
local function told(run, blocking, wait)
  local rules = {}
  for i, rule in ipairs(run.rules) do
    local left, _, reset = kind(rule).look(rule, 0)
    rules[i] = {left, reset}
  end
  return cjson.encode({
    granted = not blocking, rule = blocking or 0, wait = wait or 0, rules = rules, swept = swept})
end

-- As what it used is told by several gateways, and by some late.
local function most_of(used, before)
  for name, amount in pairs(before) do used[name] = math.max(used[name], amount) end
  return used
end

-- One that was charged `before` is counted.
local function counted(run, before)
  if before then
    run.held.requests = 0
    run.used = most_of(run.used, before.used)
  end
  return run
end

-- Holds what it may use, whether there is room or not.
local function go_on(id, run)
  move(run, run.held, nil)
  stand(id, run)
end

function ops.reserve(id, run)
  swept = sweep(SWEPT)
  local known, before = standing(id, run), charged(id, run)
  run.rules = located(run.rules) -- they may be others than when it was reserved for
  if known then
    known.by = run.attempt
    stand(id, known)
    return told(run)
  end
  local was_lost = before and before.status == 'lost'
  if before and not was_lost and before.attempt == run.attempt then return told(run) end -- late
  counted(run, before)
  if was_lost then
    go_on(id, run)
    return told(run)
  end
  local blocking, longest
  for i, rule in ipairs(run.rules) do
    local _, wait = kind(rule).look(rule, run.held[rule.of] or 0)
    if wait ~= 0 and longest ~= NEVER and (wait == NEVER or wait > (longest or 0)) then
      blocking, longest = i, wait
    end
  end
  if blocking then return told(run, blocking, longest) end
  go_on(id, run)
  return told(run)
end

function ops.hold(id, run)
  local known = standing(id, run)
  if known then
    known.used, known.by = most_of(run.used, known.used), run.attempt
    stand(id, known)
    return 1
  end
  local before = charged(id, run)
  if before and before.status ~= 'lost' then return 0 end
  run.rules = located(run.rules)
  go_on(id, counted(run, before))
  return 1
end

function ops.settle(id, run)
  local known, before = standing(id, run), charged(id, run)
  if known then
    if run.status == 'cancelled' and known.by and known.by ~= run.attempt then
      known.used = most_of(run.used, known.used)
      call('HSET', OPEN, id, cmsgpack.pack(known))
      return 0
    end
    leave(id, known)
    known.used, known.by = run.used, run.attempt
    if before and before.status == 'released' then before = nil end -- its reservation was another's
    return close(id, known, known.held, before, run.status)
  end
  run.rules = located(run.rules)
  leave(id, run) -- what stands there may be one that cannot be read
  return close(id, run, {}, before, run.status)
end

function ops.release(id, run)
  local known = find(id)
  if known and known.attempt == run.attempt then give_back(id, known) end
  if not charged(id, run) then
    remember(id, {prompt = 0, cached = 0, output = 0, cost = 0}, 'released', run.attempt)
  end
  return 1
end

if op == 'sweep' then
  local aside = {}
  return {sweep(tonumber(ARGV[4]), aside), aside}
end
return ops[op](ARGV[4], ARGV[5] and cjson.decode(ARGV[5]))
