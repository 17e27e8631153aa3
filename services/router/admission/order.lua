-- Admission to one model's slots: one order for all routers. One call is one atomic step.
-- fair_order.py is the same order in Python; a test holds them equal.
--
-- Lanes (1 high, 2 normal, 3 low) come strictly one after the other. Within a lane those tenants come
-- first that hold no slot; then all share by weight (start-time fair queuing): each grant charges its
-- tenant cost / weight of virtual time, and the tenant furthest behind is next. Of its own requests
-- the best lane comes first, and in it the first come. A tenant that waits and has held no slot for
-- `ageing` seconds rises one lane: this keeps it from starving by others, and those that are served
-- stay where they are.
--
-- Nothing is charged for waiting. What the cost, an expectation, missed is settled when the request
-- leaves; a lease that runs out gives its charge back.
--
-- When all slots are held, the next in order has waited `patience` seconds and another tenant has
-- several and at least twice the slots, by weight, that its own would then have, the youngest of that
-- tenant's is recalled: its router gives the slot back (`yield`), and it waits again with the arrival it had.
-- Who waits above the low lane recalls, at once, the youngest of the low lane's, whoever's: what runs
-- there fills what is idle. A request is recalled so many times for either, then it keeps its slot.
--
-- The queue is bounded, and its places are shared too: in a full one, a tenant that has less than an
-- equal part of them takes the place of the last request of the tenant that has the most, and one
-- that has its part the place of its own last request of a lower lane.
--
-- Keys, all below KEYS[1] (one hash slot):
--   :clock     hash   virtual: the virtual time; service: how long a slot is held
--                     (mean, s); served: how many slots came back
--   :finish    zset   tenant -> virtual time up to which it was served, if ahead of the clock
--   :entries   hash   request -> what is known of it (msgpack). All keys below can be made from it
--   :held      zset   request -> its slot's lease, Unix seconds
--   :slots     zset   held requests as "tenant flag lane granted id", by name (flags: see `seat`)
--   :seats     zset   the same as "flag lane granted id", by name
--   :shares    zset   tenant with slots -> slots / weight
--   :asked     zset   request that was recalled and holds on still -> since when
--   :waiting   zset   request -> its place's lease, Unix seconds
--   :line      zset   waiting requests as "tenant lane arrival id", by name
--   :tenants   zset   tenant with waiting requests -> how many
--   :since     zset   such a tenant -> since when it has waited, or held no slot
--   :lift      zset   such a tenant -> when it rises a lane
--   :lane:<n>  zset   such a tenant, in one lane -> its virtual start. Each lane has two: 2n-1 for
--                     tenants without a slot, 2n for the others
--
-- ARGV: op, router, channel, capacity (slots), lease, ageing, patience (s), recalls of one request, then
--   enter   id, tenant, lane, work (cost / weight), weight, recalls, waited (s), limit
--                                             -> state, requests that waited before it
--   tell    count, (id, tenant, lane, work, weight, recalls)...: so many run, and Redis does not
--           know them; (id, work missed)...: these have left
--   yield   id, work missed, work left, waited -> state
--   renew   count, held id..., waiting id...  -> held ids, then waiting ids that are not known
--   status                                    -> held, waiting
-- Before these, each reply (JSON: read at once) has what became of the calling router's requests:
-- granted, displaced, recalled (ids), an advice for the displaced: in how many seconds one that came
-- now would have its turn, and how many hold a slot and wait. An empty list may be an empty object.
-- Other routers are told on <channel><router>, as JSON: [what, KEYS[1], id, advice].

local root = KEYS[1]
local op, router, channel = ARGV[1], ARGV[2], ARGV[3]
local capacity, lease, ageing = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local patience, recalls = tonumber(ARGV[7]), tonumber(ARGV[8])
local FIRST = 9 -- of the op's own arguments
local LOWEST = 3 -- lane
local call = redis.call
local time = call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local told = {granted = {}, displaced = {}, recalled = {}}

local function key(name) return root .. ':' .. name end
local CLOCK, FINISH, ENTRIES = key('clock'), key('finish'), key('entries')
local HELD, SLOTS, SEATS = key('held'), key('slots'), key('seats')
local SHARES, ASKED = key('shares'), key('asked')
local WAITING, LINE, TENANTS = key('waiting'), key('line'), key('tenants')
local SINCE, LIFT = key('since'), key('lift')
local LANES = {}
for n = 1, 6 do LANES[n] = key('lane:' .. n) end

local function clock(field) return tonumber(call('HGET', CLOCK, field) or 0) end
local function size(k) return call('ZCARD', k) end
local function score(k, member) return tonumber(call('ZSCORE', k, member) or nil) end
local function exact(x) return string.format('%.17g', x) end

local function entry_of(id)
  local raw = call('HGET', ENTRIES, id)
  return raw and cmsgpack.unpack(raw)
end

-- "tenant, mark, ..., id": the names in :line and :slots, in the order that they are taken.
local function name(tenant, mark, at, id)
  return table.concat({tenant, mark, string.format('%017.6f', at), id}, '\0')
end
local function id_in(member) return member:match('[^%z]+$') end
local function without(tenant, member) return member:sub(#tenant + 2) end
local function mark_in(member, tenant) return member:sub(#tenant + 2, #tenant + 2) end

-- A tenant's, from a mark on.
local function from(tenant, mark) return '[' .. tenant .. '\0' .. (mark or '') end
local function to(tenant) return '(' .. tenant .. '\1' end
local function how_many(k, tenant, mark)
  return call('ZLEXCOUNT', k, from(tenant, mark), to(tenant))
end
local function first(k, tenant)
  return call('ZRANGEBYLEX', k, from(tenant), to(tenant), 'LIMIT', 0, 1)[1]
end
local function last(k, tenant, skip)
  return call('ZREVRANGEBYLEX', k, to(tenant), from(tenant), 'LIMIT', skip or 0, 1)[1]
end

-- ---- the tenants' virtual time ------------------------------------------------------------------

-- Virtual start of the tenant's next request.
local function start_of(tenant)
  return math.max(clock('virtual'), score(FINISH, tenant) or 0)
end

local function forget_past()
  call('ZREMRANGEBYSCORE', FINISH, '-inf', exact(clock('virtual')))
end

-- After a charge: the tenant's place in its lane goes by its new start.
local function restart(tenant)
  if not score(TENANTS, tenant) then return end
  local start = start_of(tenant)
  for _, lane in ipairs(LANES) do
    call('ZADD', lane, 'XX', start, tenant)
  end
end

local function charge(tenant, start, work)
  call('HSET', CLOCK, 'virtual', exact(math.max(clock('virtual'), start)))
  call('ZADD', FINISH, start + work, tenant)
  forget_past()
  restart(tenant)
end

-- Charges what a grant's work missed, or gives back (less than 0) as far as it is not past yet.
local function settle(tenant, missed)
  if missed == 0 then return end
  call('ZADD', FINISH, start_of(tenant) + missed, tenant)
  forget_past()
  restart(tenant)
end

-- ---- what waits and what holds ------------------------------------------------------------------

-- How many slots a tenant has that it was not asked to give back.
local function slots_of(tenant) return how_many(SLOTS, tenant, '1') end

-- Puts a tenant in the lane of its first request, raised by the time it has gone without a slot.
local function place(tenant)
  local front, start = first(LINE, tenant), nil
  local since = score(SINCE, tenant)
  for _, lane in ipairs(LANES) do
    start = start or score(lane, tenant)
    call('ZREM', lane, tenant)
  end
  if not front then
    for _, k in ipairs({TENANTS, SINCE, LIFT}) do call('ZREM', k, tenant) end
    return
  end
  local served = slots_of(tenant) > 0
  local lifts = served and 0 or math.max(0, math.floor((now - since) / ageing))
  local lane = math.max(1, tonumber(mark_in(front, tenant)) - lifts)
  local half = served and 0 or 1
  call('ZADD', LANES[2 * lane - half], start or start_of(tenant), tenant)
  call('ZADD', TENANTS, how_many(LINE, tenant), tenant)
  local ages = lane > 1 and not served
  call('ZADD', LIFT, ages and since + ageing * (lifts + 1) or 'inf', tenant)
end

local function share(tenant, weight)
  local slots = how_many(SLOTS, tenant)
  if slots == 0 then call('ZREM', SHARES, tenant) else call('ZADD', SHARES, slots / weight, tenant) end
  if score(TENANTS, tenant) then
    if slots_of(tenant) == 0 then call('ZADD', SINCE, now, tenant) end
    place(tenant)
  end
end

-- A request's mark among the held: 0 it was recalled, 1 it may not be, 2 it may.
local function seat(id, entry, until_)
  local flag = entry.asked and '0' or entry.recalls >= recalls and '1' or '2'
  entry.name = name(entry.tenant, flag .. entry.lane, entry.granted, id)
  call('ZADD', HELD, until_, id)
  call('ZADD', SLOTS, 0, entry.name)
  call('ZADD', SEATS, 0, without(entry.tenant, entry.name))
  call('HSET', ENTRIES, id, cmsgpack.pack(entry))
  share(entry.tenant, entry.weight)
end

local function unseat(entry)
  call('ZREM', SLOTS, entry.name)
  call('ZREM', SEATS, without(entry.tenant, entry.name))
end

local function queue(id, entry, until_, since)
  entry.name = name(entry.tenant, entry.lane, entry.arrived, id)
  call('ZADD', WAITING, until_, id)
  call('ZADD', LINE, 0, entry.name)
  call('ZADD', SINCE, 'NX', since, entry.tenant)
  call('HSET', ENTRIES, id, cmsgpack.pack(entry))
  place(entry.tenant)
end

-- Takes a request out, wherever it is.
local function take(id, entry)
  call('HDEL', ENTRIES, id)
  if entry.granted then
    call('ZREM', HELD, id)
    unseat(entry)
    call('ZREM', ASKED, id)
    share(entry.tenant, entry.weight)
  else
    call('ZREM', WAITING, id)
    call('ZREM', LINE, entry.name)
    place(entry.tenant)
  end
end

local function hold(id, entry, until_, start)
  charge(entry.tenant, start, entry.work)
  entry.granted = now
  seat(id, entry, until_)
end

local function asked(id, entry, yes)
  unseat(entry)
  entry.asked = yes
  if yes then call('ZADD', ASKED, now, id) else call('ZREM', ASKED, id) end
  seat(id, entry, score(HELD, id))
end

-- ---- repair, leases, ageing ---------------------------------------------------------------------

-- Whether no key is missing (evicted, deleted); only whole keys go.
local function whole()
  local tenants, in_lanes = size(TENANTS), call('EXISTS', unpack(LANES))
  if tenants > 0 then
    in_lanes = 0
    for _, lane in ipairs(LANES) do in_lanes = in_lanes + size(lane) end
  end
  local holding, waiting = call('EXISTS', HELD, SLOTS, SEATS, SHARES),
    call('EXISTS', WAITING, LINE, TENANTS, SINCE, LIFT)
  return (holding == 0 or holding == 4) and (waiting == 0 or waiting == 5)
    and call('HLEN', ENTRIES) == size(HELD) + size(WAITING)
    and in_lanes == tenants and size(ASKED) <= size(HELD)
end

-- Makes everything anew from the entries; those that are lost too are told again by their routers.
local function repair()
  local entries = call('HGETALL', ENTRIES)
  call('DEL', ENTRIES, HELD, SLOTS, SEATS, SHARES, ASKED, WAITING, LINE, TENANTS, SINCE, LIFT,
    unpack(LANES))
  for i = 1, #entries, 2 do
    local id, entry = entries[i], cmsgpack.unpack(entries[i + 1])
    if entry.granted then
      seat(id, entry, now + lease)
      if entry.asked then call('ZADD', ASKED, now, id) end
    else
      queue(id, entry, now + lease, now)
    end
  end
end

local function expire()
  for _, id in ipairs(call('ZRANGEBYSCORE', HELD, '-inf', now)) do
    local entry = entry_of(id)
    take(id, entry)
    settle(entry.tenant, -entry.work)
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', WAITING, '-inf', now)) do take(id, entry_of(id)) end
end

local function lift()
  for _, tenant in ipairs(call('ZRANGEBYSCORE', LIFT, '-inf', now)) do place(tenant) end
end

-- ---- decisions ----------------------------------------------------------------------------------

-- Tells a request's router what became of it.
local function tell(what, id, entry, advice)
  if entry.router == router then
    table.insert(told[what], id)
  else
    call('PUBLISH', channel .. entry.router, cjson.encode({what, root, id, advice or '0'}))
  end
end

-- When a request that came now would have its turn, seconds; 0 if nothing is known.
local function advice()
  local between = clock('service') / math.max(1, capacity)
  return string.format('%.3f', between * (size(WAITING) + 1))
end

local function next_tenant()
  for n, lane in ipairs(LANES) do
    local tenant = call('ZRANGE', lane, 0, 0, 'WITHSCORES')
    if tenant[1] then return math.ceil(n / 2), tenant[1], tonumber(tenant[2]) end
  end
end

-- Grants free slots in order. A grant lasts as long as the place did, until its router renews it:
-- what is granted to a dead router is back as soon as its other leases are.
local function pump()
  if size(WAITING) == 0 then return end
  while size(HELD) < capacity do
    local _, tenant, start = next_tenant()
    if not tenant then return end
    local id = id_in(first(LINE, tenant))
    local entry, until_ = entry_of(id), score(WAITING, id)
    take(id, entry)
    hold(id, entry, until_, start)
    tell('granted', id, entry)
  end
end

-- What the next in order needs, with `coming` slots on their way to its tenant: in what lane, the
-- share that its tenant would then have, and how long it has waited.
local function need(coming)
  local lane, tenant = next_tenant()
  if not tenant or coming >= how_many(LINE, tenant) then return end
  local entry = entry_of(id_in(first(LINE, tenant)))
  return lane, (slots_of(tenant) + coming + 1) / entry.weight, now - entry.arrived
end

-- Whether one of so many slots should go to it. Nobody loses the only one, and it takes twice as many,
-- so that tenants do not recall each other's in turns.
local function owes(entry, slots, lane, own)
  return entry.lane >= lane and slots > 1 and slots / entry.weight >= 2 * own
end

-- The request to recall: the youngest, in its lowest lane, of the tenant that has the most.
local function to_recall(lane, own)
  for i = 0, size(SHARES) - 1 do
    local tenant, has = unpack(call('ZREVRANGE', SHARES, i, i, 'WITHSCORES'))
    if tonumber(has) < 2 * own then return end
    local member = last(SLOTS, tenant)
    local id = id_in(member)
    local entry = entry_of(id)
    if mark_in(member, tenant) == '2' and owes(entry, slots_of(tenant), lane, own) then
      return id, entry
    end
  end
end

-- Whether more wait above the lowest lane than slots are coming. Of a tenant that has risen there,
-- one does: then it is served.
local function presses(coming)
  local waiting = 0
  for n = 1, 2 * (LOWEST - 1) do
    for i = 0, size(LANES[n]) - 1 do
      local tenant = call('ZRANGE', LANES[n], i, i)[1]
      local above = how_many(LINE, tenant) - how_many(LINE, tenant, tostring(LOWEST))
      waiting = waiting + math.max(1, above)
      if waiting > coming then return true end
    end
  end
  return false
end

-- The youngest in the lowest lane, of those that may be recalled.
local function to_stand_aside()
  local member = call('ZREVRANGE', SEATS, 0, 0)[1]
  if not member or member:sub(1, 2) ~= '2' .. LOWEST then return end
  return id_in(member), entry_of(id_in(member))
end

local function recall_one(id, entry)
  asked(id, entry, true)
  tell('recalled', id, entry)
end

local function recall()
  if recalls == 0 or size(HELD) ~= capacity then return end
  while presses(size(ASKED)) do
    local id, entry = to_stand_aside()
    if not id then break end
    recall_one(id, entry)
  end
  while true do
    local lane, own, waited = need(size(ASKED))
    if not lane or waited < patience then return end
    local id, entry = to_recall(lane, own)
    if not id then return end
    recall_one(id, entry)
  end
end

-- The tenant's last request that has not held a slot yet; the others' answers are under way.
local function last_in_line(tenant)
  for skip = 0, how_many(LINE, tenant) - 1 do
    local id = id_in(last(LINE, tenant, skip))
    local entry = entry_of(id)
    if entry.recalls == 0 then return id, entry end
  end
end

-- Frees a place in a full queue. If the tenant, with one more, has no more than an equal part, then
-- the one that has the most has at least two more than it had, so no two take turns at this.
local function displace(tenant, lane, limit)
  local own = how_many(LINE, tenant)
  local tenants = size(TENANTS) + (own == 0 and 1 or 0)
  local equal_part = (own + 1) * tenants <= limit
  local giver = equal_part and call('ZREVRANGE', TENANTS, 0, 0)[1] or tenant
  local id, entry = last_in_line(giver)
  if not id or not equal_part and entry.lane <= lane then return false end
  tell('displaced', id, entry, advice())
  take(id, entry)
  return true
end

-- How long a slot is held: the mean of the first ten times, a moving one from then on.
local function note_service(entry)
  local weight = math.max(0.1, 1 / call('HINCRBY', CLOCK, 'served', 1))
  local mean = (1 - weight) * clock('service') + weight * (now - entry.granted)
  call('HSET', CLOCK, 'service', exact(mean))
end

local function made(tenant, lane, work, weight, recalled, waited)
  return {router = router, tenant = tenant, lane = tonumber(lane), work = tonumber(work),
    weight = tonumber(weight), recalls = tonumber(recalled), arrived = now - waited}
end

local ops = {}

function ops.enter(id, tenant, lane, work, weight, recalled, waited, limit)
  local entry = entry_of(id)
  pump()
  local before = size(WAITING)
  if entry then return entry_of(id).granted and 'granted' or 'waiting', before end
  entry = made(tenant, lane, work, weight, recalled, tonumber(waited))
  if size(HELD) < capacity then
    hold(id, entry, now + lease, start_of(tenant))
    return 'granted', before
  end
  if before >= tonumber(limit) and not displace(tenant, entry.lane, tonumber(limit)) then
    return 'full', before
  end
  queue(id, entry, now + lease, entry.arrived)
  return 'waiting', before
end

local function hold_untold(id, tenant, lane, work, weight, recalled)
  local entry = entry_of(id)
  if entry and entry.granted then return end
  if entry then take(id, entry) end
  entry = made(tenant, lane, work, weight, recalled, 0)
  hold(id, entry, now + lease, start_of(tenant))
end

local function leave(id, missed)
  local entry = entry_of(id)
  if not entry then return end
  take(id, entry)
  if entry.granted then
    settle(entry.tenant, missed)
    note_service(entry)
  end
end

function ops.tell(count)
  local left = FIRST + 1 + 6 * tonumber(count)
  for i = FIRST + 1, left - 1, 6 do hold_untold(unpack(ARGV, i, i + 5)) end
  for i = left, #ARGV, 2 do leave(ARGV[i], tonumber(ARGV[i + 1])) end
end

-- It is kept if nobody needs it any more.
ops['yield'] = function(id, missed, left, waited)
  local entry = entry_of(id)
  if not entry then return 'unknown' end
  if not entry.granted then return 'waiting' end -- it did so already, and the answer was lost
  pump()
  local slots = slots_of(entry.tenant) + (entry.asked and 1 or 0)
  local lane, own = need(0)
  local wanted = lane and (entry.lane == LOWEST and presses(0) or owes(entry, slots, lane, own))
  if size(HELD) > capacity or not wanted then
    asked(id, entry, nil)
    return 'kept'
  end
  take(id, entry)
  settle(entry.tenant, tonumber(missed))
  note_service(entry)
  entry.asked, entry.granted = nil, nil
  entry.recalls, entry.work = entry.recalls + 1, tonumber(left)
  entry.arrived = math.min(entry.arrived, now - tonumber(waited)) -- `hold` does not know it
  queue(id, entry, now + lease, now)
  return 'waiting'
end

function ops.renew(count)
  local lost, unknown = {}, {}
  for i = FIRST + 1, #ARGV do
    local id, holds = ARGV[i], i <= FIRST + tonumber(count)
    local entry = entry_of(id)
    if entry and entry.granted then
      call('ZADD', HELD, now + lease, id)
      if not holds then table.insert(told.granted, id) end
      if entry.asked then table.insert(told.recalled, id) end
    elseif holds then
      table.insert(lost, id)
    elseif entry then
      call('ZADD', WAITING, now + lease, id)
    else
      table.insert(unknown, id)
    end
  end
  return lost, unknown
end

function ops.status()
  pump()
  return size(HELD), size(WAITING)
end

if not ops[op] then return redis.error_reply('unknown op ' .. op) end
if not whole() then repair() end
expire()
lift()
local a, b = ops[op](unpack(ARGV, FIRST, FIRST + 7)) -- the two that take lists read ARGV
pump()
recall()
return cjson.encode({told.granted, told.displaced, told.recalled, advice(), size(HELD), size(WAITING),
  a or '', b or ''})
